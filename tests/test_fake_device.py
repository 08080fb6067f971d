"""Where tensors lie when a model is on an accelerator; the cases are in `fake_device.py`."""

import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("fake_device.py")


def test_everything_of_a_round_lies_on_the_models_device():
    """In a process of its own: a device, even a fake one, stays for the whole process."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        "--noconftest",
        str(CASES),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CASES.parents[1], check=False)
    assert done.returncode == 0, done.stdout
    assert "9 passed" in done.stdout
