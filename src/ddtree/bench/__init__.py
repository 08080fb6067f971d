"""`ddtree bench`: one pair, many ways of decoding, measured side by side; and what is made of the raw figures."""
