"""docs/adoption.md against the files it tells of."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from ratchet_client.init import advice, command_line, project, read_script

ROOT = Path(__file__).parents[3]
LADDER = ROOT / "examples" / "adoption"
LOOPS = {"ordinary_loop": 10, "token_loop": 12, "image_loop": 12}
SHORTEST_FIRST = [
    ("trainer_glue/plain", "trainer_glue/train"),
    ("lightning_image_classifier/plain", "lightning_image_classifier/train"),
    ("integrations/accelerate_plain", "integrations/accelerate_train"),
    *((f"{name}/plain", f"{name}/train") for name in LOOPS),
]
PAGE = (ROOT / "docs" / "adoption.md").read_text()


def maker() -> Any:
    found = spec_from_file_location("make_adoption", ROOT / "docs" / "make_adoption.py")
    assert found is not None and found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_adoption_page_diffs_match_example_files() -> None:
    assert maker().page(PAGE) == PAGE, "run python docs/make_adoption.py"
    shown = re.findall(r"<!-- diff (\S+) (\S+) -->\n```diff\n---", PAGE)
    assert shown == [*SHORTEST_FIRST, ("0_torchrun", "1_hooks")]
    lengths = [len(maker().diff(*pair).splitlines()) for pair in SHORTEST_FIRST]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(
    ("plain", "train", "most"),
    [
        *((f"{name}/plain", f"{name}/train", most) for name, most in LOOPS.items()),
        ("integrations/accelerate_plain", "integrations/accelerate_train", 3),  # one of them in the docstring
    ],
)
def test_example_adoption_changes_few_lines(plain: str, train: str, most: int) -> None:
    changed = [line for line in maker().diff(plain, train).splitlines()[2:] if line.strip("+-")]
    assert max(sum(line.startswith(sign) for line in changed) for sign in "+-") <= most


def test_transformers_trainer_adoption_changes_one_line() -> None:
    for name in ("trainer_glue", "trainer_clm"):
        added = [line for line in maker().diff(f"{name}/plain", f"{name}/train").splitlines()[2:] if line[0] in "+-"]
        assert [line for line in added if line != "+"] == ["+from ratchet.transformers import Trainer  # noqa: F811"]


def test_lightning_adoption_changes_one_line_and_one_import() -> None:
    changed = maker().diff("lightning_image_classifier/plain", "lightning_image_classifier/train").splitlines()[2:]
    assert (
        sum(line.startswith("-") for line in changed) == 1
        and sum(line.startswith("+") and line != "+" for line in changed) == 2
    )


def test_adoption_page_quotes_actual_init_notes() -> None:
    place = project.locate(str(LADDER / "0_torchrun" / "train.py"), None)
    facts = read_script.read_script(place.script, place.code)
    said = [note.text for note in advice.notes(command_line.Command("train.py", []), facts, place, None)]
    quoted = re.findall(r"^(?:warning|found): (.*)$", PAGE, re.MULTILINE)
    assert quoted and set(quoted) <= set(said)
