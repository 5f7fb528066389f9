"""Draws the pictures of the tutorial beside this file, by running the tutorial's code.

python docs/images/draw.py
"""

import os
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TUTORIAL = FOLDER.parent / "tutorial.md"

if __name__ == "__main__":
    os.chdir(FOLDER)  # The tutorial writes its pictures into the current folder.
    blocks = re.findall(r"^```python\n(.*?)^```$", TUTORIAL.read_text(), re.M | re.S)
    exec(compile("".join(blocks), str(TUTORIAL), "exec"), {"__name__": "__main__"})
