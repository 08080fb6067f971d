"""Print the pip option that finds the CPU build of torch, where that is the build to want.

On Linux, PyPI's torch is the CUDA build of several gigabytes. The CPU build lies on PyTorch's own index,
which is added where no NVIDIA GPU is present and that index answers. An argument names another index to add,
and `none` adds none.
"""

import shutil
import sys
import urllib.request

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def wanted(argument: str) -> str | None:
    if argument:
        return None if argument == "none" else argument
    if sys.platform != "linux" or shutil.which("nvidia-smi"):
        return None
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=5):
            return CPU_INDEX
    except OSError:
        return None


if index := wanted(sys.argv[1] if len(sys.argv) > 1 else ""):
    print("--extra-index-url", index)
