"""The benchmarks mqar, language_model and needle on the CPU in a tiny size, and the modules that they use."""
import argparse
import json

import pytest

torch = pytest.importorskip("torch")

import cupy_dma as dma  # noqa: E402
from benchmarks.__main__ import main  # noqa: E402
from benchmarks.harness import language, records, small_models, text  # noqa: E402
from benchmarks.harness.pages import REPORTS  # noqa: E402
from benchmarks.harness.pages_evidence import spread  # noqa: E402
from benchmarks.harness.recall import Recall  # noqa: E402
from benchmarks.harness.small_models import SCORED, Adam, Attention, Models, Sizes, scored  # noqa: E402
from benchmarks.routines import mqar, needle  # noqa: E402

SIZES = Sizes(vocabulary=50, layers=2, width=16, heads=4, kv_heads=2, inner=24, conv=3)
WORDS = {f"{kind} {n}": b"def f(): return 1\n" * (20 + n) for kind in ("a", "b") for n in range(60)}


@pytest.fixture(autouse=True)
def quickly(monkeypatch, one_thread):
    """One thread, few tests, and a small text in place of the standard library."""
    monkeypatch.setattr(text, "standard_library", lambda: text.split(WORDS))
    monkeypatch.setattr(mqar, "TESTED", 8)
    monkeypatch.setattr(needle, "TIMES", (1, 2))
    monkeypatch.setattr(needle, "DEPTHS", (0.0, 1.0))


# ---- tasks ----
def test_answers_follow_their_keys():
    recall = Recall(length=64, pairs=16, names=40)
    batch = recall.batch(8, [torch.Generator().manual_seed(seed) for seed in (0, 1)])
    assert batch.tokens.shape == (2, 8, 64) and batch.answers.shape == batch.asked.shape == (2, 8, 16)
    question, before = batch.tokens.gather(2, batch.asked), batch.tokens.gather(2, batch.told - 1)
    assert torch.equal(question, before) and torch.equal(batch.tokens.gather(2, batch.told), batch.answers)
    assert (question < 40).all() and ((batch.answers >= 40) & (batch.answers < 80)).all()
    assert all(len(set(row)) == 16 for row in question.flatten(0, 1).tolist())  # each key is asked for once
    assert (batch.asked >= 32).all() and (batch.told < 32).all()
    assert ((batch.tokens >= 80).sum(2) == 64 - 3 * 16).all()  # the rest is fillers
    assert not torch.equal(batch.tokens[0], batch.tokens[1])
    with pytest.raises(ValueError, match="at least 4 pairs long, got length=64, pairs=17"):
        Recall(64, 17, 40)


def test_needles_are_said_and_repeated():
    generator = torch.Generator().manual_seed(0)
    hay = torch.full((3, 512), ord("."))
    found, at = text.planted(hay, 4, generator)
    assert at.shape == (3, 4, 5)
    for row, codes in zip(found.tolist(), at.tolist()):
        content = bytes(row).decode()
        lines = [line for line in content.splitlines() if "# the code of" in line]
        assert len(lines) == 8 and all(lines.count(line) == 2 for line in lines)
        for code in codes:
            said = content[code[0]:code[-1] + 1]
            assert said.isdigit() and content.index(said) < code[0]


def test_contexts_end_ahead_of_the_code():
    source = text.split(WORDS)
    for depth in (0.0, 0.5, 1.0):
        hay, where, size = needle.contexts(source, 256, depth, seed=3, count=4)
        assert hay.shape == (4, 256 + size) and size == 5
        for row in hay.tolist():
            content = bytes(row).decode()
            assert content[where:where + size] == content[256:] and content[256:].isdigit()
            assert content[:256].endswith(content[where - text.CODE.start:where])


# ---- models ----
@pytest.mark.parametrize("how", [
    Attention("full"), Attention("window", 5), Attention("bias", form="linear", start=1.0),
    Attention("selection", 5, start=0.5, drawn=True), Attention("dynamic", 5, recent=2, sinks=1, start=1.0),
    Attention("dynamic", 5, form="linear", start=1.0, fixed=True), Attention("global", 5, start=1.0)], ids=str)
def test_a_stack_is_its_models(how):
    """Each model gives the output that it gives alone, and a step of one does not change another."""
    tokens = torch.randint(50, (2, 3, 24), generator=torch.Generator().manual_seed(0))
    both = Models([3, 4], SIZES, how, "cpu")
    alone = Models([4], SIZES, how, "cpu")
    torch.testing.assert_close(both(tokens)[1:], alone(tokens[1:]))
    torch.testing.assert_close(both(tokens)[:, 1:], both(tokens[:, 1:]), msg="a sequence sees the one ahead of it")
    rows = torch.tensor([5, 0, 23]).expand(2, 3, 3)
    torch.testing.assert_close(both(tokens, rows), both(tokens)[:, :, [5, 0, 23]])
    assert not torch.equal(both.embed[0], both.embed[1])
    optimizers = [Adam(models, torch.tensor(rates), torch.ones(len(rates)), decay=0.1)
                  for models, rates in ((both, [1e-1, 1e-3]), (alone, [1e-3]))]
    for _ in range(2):
        for models, optimizer, own in zip((both, alone), optimizers, (tokens, tokens[1:])):
            language.losses_of(models, own).mean((1, 2)).sum().backward()
            optimizer.step()
    for (name, x), y in zip(both.named_parameters(), alone.parameters()):
        torch.testing.assert_close(x[1:], y, msg=name)
    assert bool(dict(both.named_parameters())) and (how.kind in SCORED) == any("dt_proj" in n for n, _ in
                                                                               both.named_parameters())


@pytest.mark.parametrize("form", ["exp", "linear"])
def test_scores_are_those_of_the_layer(form):
    models = Models([0, 1], SIZES, Attention("dynamic", 5, form=form, start=1.0, drawn=True), "cpu")
    layer, value = models.layers[0], torch.randn(2, 21, 2, 4)
    found = scored(value.flatten(2), layer.dt_proj, layer.A, form)
    for i in range(2):
        expected = dma.key_scores(value[i:i + 1], layer.dt_proj[i].T.contiguous(), layer.A[i], form=form)
        torch.testing.assert_close(found[i:i + 1], expected)


def test_a_window_of_all_keys_is_full_attention():
    tokens = torch.randint(50, (2, 1, 20))
    full = Models([0, 1], SIZES, Attention("full"), "cpu")(tokens)
    for how in (Attention("window", 20), Attention("dynamic", 20), Attention("random", 20), Attention("bias")):
        torch.testing.assert_close(Models([0, 1], SIZES, how, "cpu")(tokens), full, msg=how.kind)


def test_compiled_parts_compute_the_same(monkeypatch):
    monkeypatch.setattr(small_models, "COMPILER", "aot_eager")
    small_models.compiled.cache_clear()
    tokens = torch.randint(50, (1, 2, 16))
    eager, compiled = (Models([0], SIZES, Attention("window", 5), "cpu", compile) for compile in (False, True))
    torch.testing.assert_close(compiled(tokens), eager(tokens))
    small_models.compiled.cache_clear()


def test_what_is_visible():
    """Survival of a needle, and of the pairs of a recall batch, against dense masks."""
    how = Attention("dynamic", 6, recent=2, form="linear", start=1.0)
    models = Models([0, 1], SIZES, how, "cpu")
    recall = Recall(length=32, pairs=4, names=16)
    batch = recall.batch(3, [torch.Generator().manual_seed(seed) for seed in (0, 1)])
    models(batch.tokens)
    dense = [layer.mask.to_dense(32).unflatten(0, (2, 3)) for layer in models.layers]  # (M, B, Hkv, 32, 32)
    for found, seen in zip(mqar.visible(models, batch), dense):
        expected = [[float(any(seen[m, b, :, asked, told])) for asked, told in zip(batch.asked[m, b], batch.told[m, b])]
                    for m in range(2) for b in range(3)]
        assert found.tolist() == pytest.approx(torch.tensor(expected).view(2, -1).mean(1).tolist())
    for where in (0, 9, 25):
        for found, seen in zip(needle.survival(models, where, 3, 31, 6), dense):
            assert torch.equal(found, seen.flatten(0, 1)[:, :, 31, where:where + 3].all(-1))
    lives = torch.tensor(language.lives_of(Models([0, 1, 2], SIZES, how, "cpu"), batch.tokens[0, :1], "cpu"))
    assert lives.shape == (3, 2, 2, len(language.LIVES)) and (lives.sum(-1) == 16).all()
    assert (lives[..., 0] == 0).all()  # two recent keys: each is seen


def test_loss_by_position():
    source = text.split(WORDS)
    task = language.Task(length=128, layers=1, width=16, heads=2, kv_heads=1, inner=16)
    models = language.made(task, Attention("window", 8), "cpu", False)
    found = language.by_position(models, source, 128, 5, "cpu")
    assert language.edges(128) == [0, 64, 128] and language.edges(200) == [0, 64, 128, 200]
    pieces = text.first_bytes(source, 129, 5)
    expected = language.losses_of(models, pieces.expand(3, -1, -1)).mean(1).unflatten(1, (2, 64)).mean(2)
    assert torch.tensor(found).allclose(expected, atol=1e-3)


# ---- routines ----
def started(name, folder, *arguments):
    return main([name, "--size", "tiny", "--device", "cpu", "--out", str(folder), "--commit", "abc", *arguments])


def rows_of(folder, name):
    return json.loads((folder / f"{name}.json").read_text())["rows"]


@pytest.mark.parametrize(("name", "part", "count"), [
    ("mqar", "widths", 8 * 12), ("language_model", "long", 4 * 3), ("needle", "text", 5 * 3)])
def test_a_routine_runs_and_goes_on(tmp_path, monkeypatch, capsys, name, part, count):
    own = ["--part", part] + ([] if name == "mqar" else ["--models", str(tmp_path / "models")])
    assert started(name, tmp_path, "--seconds", "0", *own) == 3
    assert not (tmp_path / f"{name}.json").exists() and "time is up" in capsys.readouterr().out
    assert started(name, tmp_path, *own) == 0
    rows = rows_of(tmp_path, name)
    assert len(rows) == count == len({records.key_of(row["settings"]) for row in rows})
    assert all(row["commit"] == "abc" and row["device"] and row["seconds"] > 0 for row in rows)
    assert (tmp_path / f"{name}.png").stat().st_size > 1000
    monkeypatch.setattr(Models, "forward", None)  # nothing is trained again
    assert started(name, tmp_path, *own) == 0 and rows_of(tmp_path, name) == rows
    capsys.readouterr()
    assert not started(name, tmp_path, "--show")
    report, result = REPORTS[name], json.loads((tmp_path / f"{name}.json").read_text())
    assert report.text(result) in capsys.readouterr().out
    table = report.pieces[0].table(result)
    for part in table.split("\n\n"):
        assert len({line.count("|") for line in part.splitlines() if line.startswith("|")}) <= 1


def test_needle_takes_the_models_that_are_there(tmp_path, monkeypatch):
    models = ["--models", str(tmp_path / "models")]
    assert started("language_model", tmp_path, "--part", "main", *models) == 0
    monkeypatch.setattr(language, "train", None)
    assert started("needle", tmp_path, "--part", "text", *models) == 0


def test_rows_are_written_one_run_after_the_other(tmp_path):
    """Rows that were complete before time ran out are in the file, and rows that another process has added stay."""
    args, done = argparse.Namespace(out=str(tmp_path), commit="abc"), []

    def run(name, late=False):
        def make(clock):
            done.append(name)
            if late:
                raise records.OutOfTime
            return [{"settings": {"name": name}, "found": len(done)}]

        return records.Run(name, [{"name": name}], make)

    first, second = (records.Record("mqar", args, None) for _ in range(2))
    assert records.train_all(first, [run("a"), run("b", late=True), run("c")], 60) == 3 and done == ["a", "b"]
    assert records.train_all(second, [run("d")], 60) == 0
    assert records.train_all(records.Record("mqar", args, None), [run("a"), run("b"), run("c")], 60) == 0
    assert [row["settings"]["name"] for row in rows_of(tmp_path, "mqar")] == done[:1] + ["d", "b", "c"]
    first.add([{"settings": {"name": "d"}, "found": 9}])
    assert [row["found"] for row in rows_of(tmp_path, "mqar")] == [1, 9, 4, 5]
    with pytest.raises(records.OutOfTime):
        records.Clock(-1).check()


def test_each_process_takes_its_share(tmp_path):
    for share, count in (("1/2", 48), ("2/2", 96)):
        assert started("mqar", tmp_path, "--part", "widths", "--share", share) == 0
        assert len(rows_of(tmp_path, "mqar")) == count


def test_sequences_grow():
    task = mqar.Task(length=1024, pairs=64, steps=600)
    assert [task.at(step) for step in (0, 99, 100, 299, 300, 599)] == [
        (128, 8), (128, 8), (256, 16), (512, 32), (1024, 64), (1024, 64)]
    for one in (mqar.TINY, mqar.SMALL, mqar.Task(), mqar.Task(4096, 256), mqar.Task(grow=False)):
        for step in range(one.steps):
            Recall(*one.at(step), one.names)
        assert one.at(one.steps - 1) == (one.length, one.pairs)


def test_pieces_grow():
    task = language.Task(length=4096, steps=800)
    assert [task.at(step) for step in (0, 99, 100, 200, 399, 400, 799)] == [256, 256, 512, 1024, 2048, 4096, 4096]
    assert language.Task(length=4096, grow=False).at(0) == 4096
    small = language.Task(length=1024, tokens=1024, steps=8, layers=1, width=16, heads=2, kv_heads=1, inner=16,
                          planted=True)
    found = language.train(small, Attention("full"), text.split(WORDS), "cpu", False, records.Clock(60))
    assert len(found.losses) == 1 and all(x > 0 for x in found.losses[0])


def test_models_without_numbers_end():
    small = language.Task(length=64, tokens=64, steps=300, layers=1, width=16, heads=2, kv_heads=1, inner=16,
                          rate=float("nan"))
    found = language.train(small, Attention("full"), text.split(WORDS), "cpu", False, records.Clock(60))
    assert len(found.losses) == 1
    assert spread([2.0, 2.04]) == "2.0" and spread([]) == "–"
    assert spread([float("nan")]) == "NaN" and spread([1.0, float("nan"), 3.0]) == "2.0 (1.0–3.0), 1 NaN"
