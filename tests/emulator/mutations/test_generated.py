"""Generated mutants: each is one edit of one place, its name is its own, and a check catches it."""
import pytest

from cupy_dma.backends.cuda.runtime import jit
from tests.emulator.mutations import generated

ALL = generated.everything()


@pytest.mark.parametrize("mutant", [m for m in ALL if not m.unseen], ids=lambda mutant: mutant.name)
def test_generated_mutants_are_caught(mutant):
    assert generated.verdict(mutant, generated.checks_of(mutant)) == "caught"


@pytest.mark.parametrize(("why", "file", "old", "reason"), generated.UNSEEN)
def test_places_that_are_not_tried_have_a_mutant_each(why, file, old, reason):
    text = (jit.kernels_directory() / file).read_text()
    assert text.count(old) == 1
    found = [m for m in ALL if m.file == file and 0 <= m.start - text.index(old) < len(old)]
    assert [m.unseen for m in found] == [f"{why}: {reason}"]


def test_every_kind_is_found():
    kinds = {mutant.name.split(" ", 1)[1] for mutant in ALL}
    assert {f"no {name}" for name in generated.STATEMENTS} <= kinds
    assert {"no __syncthreads_or", "no __syncthreads_and", "key_row <-> key_head", "bias_query <-> bias_key"} <= kinds


def test_names_are_unique():
    assert len({mutant.name for mutant in ALL}) == len(ALL)


def test_checks_of_every_mutant_are_known():
    assert all(checks and set(checks) <= set(generated.CHECKS) for checks in map(generated.checks_of, ALL[::7]))


def test_each_changes_one_place_of_code():
    texts = {mutant.file: (jit.kernels_directory() / mutant.file).read_text() for mutant in ALL}
    changed = set()
    for mutant in ALL:
        text, line = texts[mutant.file], int(mutant.name.split(":")[1].split(" ")[0])
        after = mutant.applied_to(text)
        assert after != text
        assert after[:mutant.start] == text[:mutant.start] and text.endswith(after[mutant.start + len(mutant.new):])
        assert text[:mutant.start].count("\n") == line - 1
        assert "//" not in text[text.rfind("\n", 0, mutant.start) + 1:mutant.start]
        changed.add((mutant.file, after))
    assert len(changed) == len(ALL)


def test_edits_of_a_text():
    text = """void wait() { named_barrier(1, 2); }  // __syncthreads();
    if (x) c.ping_pong_arrive();
    wgmma_wait<more ? 1 : 0>();
    any = __syncthreads_or(any);
    f(p.key + b * p.key_batch + i * p.key_row, p.value_row);
"""
    found = [(kind, text[:start] + new + text[stop:]) for start, stop, new, kind in generated.edits(text)]
    assert found == [
        ("no named_barrier", text.replace("named_barrier(1, 2);", ";")),
        ("no ping_pong_arrive", text.replace("c.ping_pong_arrive();", ";")),
        ("no wgmma_wait", text.replace("wgmma_wait<more ? 1 : 0>();", ";")),
        ("no __syncthreads_or", text.replace("__syncthreads_or", "")),
        ("key_batch <-> key_row", text.replace("b * p.key_batch + i * p.key_row", "b * p.key_row + i * p.key_batch"))]


@pytest.mark.parametrize("new, expected", [
    (None, "survived"), (";", "caught"), ("__trap_that_is_not_there();", "not compiled")])
def test_verdicts(new, expected):
    mutant = next(m for m in ALL if m.name.startswith("sm80/forward.cu") and m.name.endswith(" __syncthreads"))
    text = (jit.kernels_directory() / mutant.file).read_text()
    same = text[mutant.start:mutant.stop]
    assert generated.verdict(mutant._replace(new=same if new is None else new),
                             generated.checks_of(mutant)[:1]) == expected
