"""Prints what pyproject.toml asks for with some extras, so that an image installs that before Ratchet's sources are there.

python requirements.py service,postgres > requirements.txt
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = [extra for extra in sys.argv[1].split(",") if extra]
print(
    "\n".join(
        [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    )
)
