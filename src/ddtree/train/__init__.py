"""Making a drafter for a target: synthesize answers, fit, evaluate, export."""
