"""The built-in tasks' data and models, and the model that bytelm has to beat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ratchet_contract.errors import UserError
from ratchet_worker.task import Sums, TaskContext
from ratchet_worker.tasks.bytelm import ByteLMTask, ByteTransformer, crop
from ratchet_worker.tasks.digits import DigitsTask, load_digits, shift
from ratchet_worker.tasks.stdlib_bytes import load_corpus
from tests.support.byte_baseline import OrderTwo


def context(rank: int = 0, world: int = 2) -> TaskContext:
    return TaskContext(rank, world, rank, torch.device("cpu"), 0)


def test_digits_are_scikit_learns_and_every_fifth_is_held_back() -> None:
    from sklearn import datasets  # a second, which every worker would spend that only collects

    bunch = datasets.load_digits()
    train, held_back = load_digits()
    assert (len(train), len(held_back)) == (1437, 360)
    rest = [i for i in range(1797) if i % 5]
    assert np.array_equal(held_back.images.numpy() * 16, bunch.images[::5, None])
    assert np.array_equal(train.images.numpy() * 16, bunch.images[rest, None])
    assert held_back.labels.tolist() == bunch.target[::5].tolist()
    assert train.labels.tolist() == bunch.target[rest].tolist()
    assert train.digest() == load_digits()[0].digest() != held_back.digest()


def test_shift_moves_image_by_at_most_one_pixel_in_each_direction() -> None:
    image = torch.zeros(1, 8, 8)
    image[0, 3, 4] = 1
    generator = torch.Generator().manual_seed(0)
    places = {tuple(shift((image, torch.tensor(1)), generator)[0].nonzero()[0].tolist()) for _ in range(200)}
    assert places == {(0, 3 + a, 4 + b) for a in (-1, 0, 1) for b in (-1, 0, 1)}


def total(task: DigitsTask | ByteLMTask, world: int, metric: str) -> tuple[float, float]:
    """(sum, weight) of a metric over all ranks' shares, with the model of rank 0."""
    value = weight = 0.0
    torch.manual_seed(0)
    model = task.build(context(0, world)).model.eval()
    for rank in range(world):
        task.build(context(rank, world))
        for batch in task.evaluation():
            with torch.no_grad():
                sums: Sums = task.evaluate(model, batch)
            value, weight = value + sums[metric][0], weight + sums[metric][1]
    return value, weight


def test_evaluation_counts_every_held_back_sample_once_on_any_world_size() -> None:
    one, three = (total(DigitsTask(), world, "test_accuracy") for world in (1, 3))
    assert one == three and one[1] == 360
    task = ByteLMTask(width=8, heads=1, layers=1, context=48, held_back_bytes=10_000, train_bytes=50_000)
    first, second = (total(task, world, "test_bits_per_byte") for world in (1, 3))
    assert first[1] == second[1] == 9_999
    assert first[0] == pytest.approx(second[0], rel=1e-6)


def make_library(root: Path) -> Path:
    for n in range(60):
        (root / f"module{n}.py").write_text(f"x = {n}\n" * 20)
    for name in (
        "test/secret.py",
        "email/tests/secret.py",
        "site-packages/secret.py",
        "_sysconfigdata_x.py",
        "notes.txt",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("SECRET")
    (root / "large.py").write_text("#" * 200_000)
    return root


def test_corpus_excludes_secrets_and_splits_files_deterministically(tmp_path: Path) -> None:
    root = make_library(tmp_path)
    corpus = load_corpus(10**6, 10**6, root)
    both = corpus.train.tobytes() + corpus.held_back.tobytes()
    assert b"SECRET" not in both
    assert both.count(b"#") == 32 * 1024
    assert not set(corpus.train_files) & set(corpus.held_back_files)
    assert len(corpus.train_files) + len(corpus.held_back_files) == 61
    assert both.count(b"\0") >= 60
    assert load_corpus(10**6, 10**6, root).digest == corpus.digest
    small = load_corpus(1000, 100, root)
    assert (len(small.train), len(small.held_back)) == (1000, 100)
    assert corpus.train.tobytes().startswith(small.train.tobytes())
    assert small.digest != corpus.digest
    (root / corpus.train_files[0]).write_text("changed")
    changed = load_corpus(10**6, 10**6, root)
    assert changed.digest != corpus.digest
    assert (changed.train_files, changed.held_back_files) == (corpus.train_files, corpus.held_back_files)


def test_corpus_without_python_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no Python source files"):
        load_corpus(1000, 1000, tmp_path)


@pytest.mark.parametrize("cap", ["train_bytes", "held_back_bytes"])
def test_bytelm_without_bytes_is_refused(cap: str) -> None:
    options: dict[str, Any] = {cap: 0}
    with pytest.raises(UserError, match="train_bytes and held_back_bytes are at least 1"):
        ByteLMTask(**options).build(context())


def test_order_two_model_is_witten_bell() -> None:
    """Against the formula written out with plain counting, and as a probability: the 256 next bytes sum to one."""
    train = np.frombuffer(b"abracadabra abacus" * 3 + b"xyz", dtype=np.uint8)
    model = OrderTwo(train)
    text = train.tobytes()

    def probability(history: bytes, byte: int) -> float:
        lower = 1 / 256 if not history else None
        starts = [i for i in range(len(text) - len(history)) if text[i : i + len(history)] == history]
        followers = [text[i + len(history)] for i in starts]
        below = lower if lower is not None else probability(history[1:], byte)
        if not followers:
            return below
        distinct = len(set(followers))
        return (followers.count(byte) + distinct * below) / (len(followers) + distinct)

    data = b"abrazy qab"
    bits = [-np.log2(probability(data[max(0, i - 2) : i], data[i])) for i in range(1, len(data))]
    assert model.bits_per_byte(np.frombuffer(data, dtype=np.uint8)) == pytest.approx(np.mean(bits), rel=1e-12)
    for history in (b"ab", b"qq", b"zz"):
        assert sum(probability(history, c) for c in range(256)) == pytest.approx(1)


def test_transformer_attention_is_causal() -> None:
    torch.manual_seed(0)
    model = ByteTransformer(16, 2, 2, 32, 0.0, 64).eval()
    x = torch.randint(0, 256, (1, 32), dtype=torch.uint8)
    changed = x.clone()
    changed[0, 20] ^= 1
    with torch.no_grad():
        before, after = model(x), model(changed)
    assert torch.equal(before[0, :20], after[0, :20])
    assert not torch.equal(before[0, 20], after[0, 20])


def test_crops_are_windows_of_the_text() -> None:
    sample = torch.arange(20, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    crops = [crop(sample, generator) for _ in range(300)]
    assert {int(c[0]) for c in crops} == set(range(10))
    assert all(torch.equal(c, torch.arange(int(c[0]), int(c[0]) + 11, dtype=torch.uint8)) for c in crops)
