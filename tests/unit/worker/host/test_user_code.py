"""Wrong entrypoints, arguments and scripts: each is told as what it is, with what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.errors import UserError
from ratchet_contract.spec.job import TaskSpec
from ratchet_worker.host import user_code

FILES = {
    "good.py": "class Task:\n    def __init__(self, n=1): self.n = n\n    build = loss = lambda *a: None\nnumber = 3\n"
    "class Half:\n    def build(self, ctx): ...\n"
    "class Raises:\n    def __init__(self): raise TypeError('mine')\n    build = loss = lambda *a: None\n",
    "needs.py": "import a_module_that_nobody_has\n",
    "broken.py": "def f(:\n",
    "odd.py": "from good import missing\n",
    "hooks.py": "OWNER = 'user'\nclass Task:\n    build = loss = lambda *a: None\n",
    "script.py": "import sys, hooks\nnumber: int = 1\n"
    "assert hooks.OWNER == 'user' and __name__ == '__main__'\nprint('ran', sys.argv[1:])\n",
}


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    user_code.add_to_path(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("entrypoint", "args", "words"),
    [
        ("nowhere:Task", {}, ["no module named 'nowhere'", "good.py", "code.path"]),
        ("good.sub:Task", {}, ["good"]),
        ("needs:Task", {}, ["a_module_that_nobody_has", f"{sys.executable} -m pip install a_module_that_nobody_has"]),
        ("broken:Task", {}, ["SyntaxError"]),
        ("odd:Task", {}, ["ImportError", "missing"]),
        ("good:Tusk", {}, ["no 'Tusk'", "Task"]),
        ("good:number", {}, ["is a int"]),
        ("good:Half", {}, ["no loss"]),
        ("good:Task", {"m": 2}, ["task.args", "'m'", "(n=1)"]),
    ],
)
def test_wrong_entrypoint_raises_user_error_with_reason(
    workdir: Path, entrypoint: str, args: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        user_code.make_task(TaskSpec(entrypoint=entrypoint, args=args), workdir)
    assert all(word in caught.value.detail for word in words), caught.value.detail


def test_user_modules_take_precedence_and_exceptions_propagate(workdir: Path) -> None:
    task = user_code.make_task(TaskSpec(entrypoint="good:Task", args={"n": 4}), workdir)
    assert task.n == 4
    assert user_code.make_task(TaskSpec(entrypoint="hooks:Task"), workdir) is not None
    assert Path(sys.modules["hooks"].__file__ or "").parent == workdir
    with pytest.raises(TypeError, match="mine"):
        user_code.make_task(TaskSpec(entrypoint="good:Raises"), workdir)


def test_script_runs_as_main_with_arguments(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    user_code.run_script(["script.py", "--lr", "0.1"], workdir)
    assert capsys.readouterr().out == "ran ['--lr', '0.1']\n"
    main = sys.modules["__main__"]
    assert main.__file__ == str(workdir / "script.py") and main.__annotations__ == {"number": int}
    for script, word in (("absent.py", "script.py"), ("broken.py", "not valid Python")):
        with pytest.raises(UserError, match=word):
            user_code.run_script([script], workdir)
