"""The benchmark retrofit.py on the CPU in a tiny size, and what it stands on: the split, needles, kept rows."""
import gzip
import json
import zlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from benchmarks.__main__ import main  # noqa: E402
from benchmarks.harness import corpus, generation, kept_rows, pages_retrofit, records  # noqa: E402
from benchmarks.harness.kept_rows import SINKS, attend_by, best, most_seen, within  # noqa: E402
from benchmarks.harness.pages import REPORTS  # noqa: E402
from benchmarks.routines import retrofit, retrofit_speed  # noqa: E402

WORDS = "def keep(row, of=None):\n    return row  # as it was, if {} is not {}\n"


@pytest.fixture(autouse=True)
def quickly(monkeypatch, one_thread):
    """One thread, two seeds, two depths."""
    monkeypatch.setattr(retrofit, "SEEDS", (0, 1))
    monkeypatch.setattr(retrofit, "DEPTHS", (0.0, 1.0))


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
                                 merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
    return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def documents():
    return [corpus.Document(kind, f"{kind} {n // 2}", "".join(WORDS.format(kind, i * n) for i in range(30)))
            for kind in corpus.KINDS for n in range(120)]


@pytest.fixture(scope="module")
def data(tmp_path_factory, tokenizer, model, documents):
    folder = tmp_path_factory.mktemp("data")
    arrays, manifest = corpus.made(documents, lambda text: tokenizer(text).input_ids, 257, 8000, 2, 2000, 0)
    corpus.write(folder / "tokens", arrays, manifest)
    tokenizer.save_pretrained(folder / "tokens")
    model.save_pretrained(folder / "unpacked")
    return folder


def losses(model, ids, attend):
    return kept_rows.nats(model, kept_rows.states(model, ids, attend), ids, chunk=64)


# ---- data -----------------------------------------------------------------------------------------------------------
def test_documents_are_split_by_group(documents, tokenizer):
    arrays, manifest = corpus.made(documents, lambda text: tokenizer(text).input_ids, 257, 8000, 2, 2000, 0)
    for kind in corpus.KINDS:
        learned = set(manifest["groups"][kind])
        assert learned and not any(map(corpus.is_held_out, learned))
        assert all(map(corpus.is_held_out, manifest["held_out"][kind]))
        assert arrays[f"held_out_{kind}"].shape == (2, 257)
    said = {one.text: one.group for one in documents}
    training = tokenizer.decode(arrays["training"].tolist())
    for kind in corpus.KINDS:
        for row in arrays[f"held_out_{kind}"]:
            first = tokenizer.decode(row.tolist())
            assert any(corpus.is_held_out(group) and text.startswith(first) for text, group in said.items())
            assert first not in training
    assert len(arrays["training"]) <= 16000 and len(arrays["hay"]) == 2000


def test_documents_of_packages(tmp_path):
    """Reads the lines of an R database, and the reStructuredText of the kernel and of Python."""
    lines = [b"PERSUASION", *(b"line %d" % i for i in range(1200))]
    record = b"head" + b"".join(b"\x00\x04\x00\x09" + len(line).to_bytes(4, "big") + line for line in lines)
    small = zlib.compress(b"few")
    packed = zlib.compress(record)
    base = tmp_path / "janeaustenr" / "data"
    base.mkdir(parents=True)
    (base / "Rdata.rdb").write_bytes(b"".join(len(x).to_bytes(4, "big") + x for x in (small, packed)))
    novel, = corpus.novels(tmp_path)
    assert novel.group == "novel: PERSUASION" and novel.text.splitlines() == [line.decode() for line in lines]
    for name, content in (("a/Documentation/mm/x.rst.gz", gzip.compress(b"kernel")),
                          ("b/_sources/library/y.rst.txt", b"python")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(content)
    assert {(one.group, one.text) for one in corpus.manuals(tmp_path)} == {("Documentation/mm", "kernel"),
                                                                           ("_sources/library", "python")}


def test_a_model_travels_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE", 10)
    whole = tmp_path / "whole"
    whole.write_bytes(bytes(range(25)))
    corpus.in_pieces(whole, tmp_path)
    corpus.write(tmp_path / "tokens", {}, {"model": {"bytes": 25, "checksum": zlib.crc32(whole.read_bytes())}})
    (tmp_path / "model1" / "part").rename(tmp_path / "away")
    with pytest.raises(ValueError, match="all pieces of the model, 25 bytes, got 15"):
        corpus.model_file(tmp_path)
    (tmp_path / "away").rename(tmp_path / "model1" / "part")
    assert corpus.model_file(tmp_path).read_bytes() == whole.read_bytes()


# ---- kept rows ------------------------------------------------------------------------------------------------------
def dense_best(scores, rows, recent):
    """Which keys each query of one head sees, written out: sinks, recent keys, the best of the others."""
    n = len(scores)
    seen = np.zeros((n, n), bool)
    for i in range(n):
        first = max(0, i + 1 - recent)
        older = sorted(range(first), key=lambda j: (j < SINKS, scores[j], j), reverse=True)
        seen[i, older[:rows - recent]] = True
        seen[i, first:i + 1] = True
    return seen


@pytest.mark.parametrize(("rows", "recent"), [(16, 6), (9, 4), (60, 20)])
def test_the_best_of_the_older_keys(rows, recent):
    scores = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(rows))
    mask = best(scores, rows, recent)
    for b, h in np.ndindex(2, 3):
        np.testing.assert_array_equal(mask.to_dense(50)[b, h], dense_best(scores[b, h].numpy(), rows, recent))
    assert most_seen(mask).max() == min(rows, 50)
    assert most_seen(mask, 40).max() == int(mask.to_dense(50)[:, :, 40:].sum(-1).max())


def test_rows_beyond_the_budget_are_noticed(model):
    ids = torch.randint(256, (1, 91), generator=torch.Generator().manual_seed(0))
    attend = attend_by("window", 40)
    losses(model, ids, within(attend, 40))
    with pytest.raises(RuntimeError, match=r"layer 0: a query sees \[40\] keys of 39"):
        losses(model, ids, within(attend, 39))
    with pytest.raises(ValueError, match="kind must be full"):
        losses(model, ids, attend_by("nothing", 40))


@pytest.mark.parametrize("kind", ["window", "h2o", "snapkv", "oracle", "random"])
def test_policies_see_everything_at_first(kind, model):
    """A policy changes nothing while the rows suffice, and then it does."""
    ids = torch.randint(256, (2, 151), generator=torch.Generator().manual_seed(1))
    score = {"oracle": kept_rows.future_attention, "random": kept_rows.random_scores(0)}.get(kind)
    first = 140 if kind == "snapkv" else 0
    full = losses(model, ids, None)
    loss = losses(model, ids, within(attend_by(kind, 90, score, following=10), 90, first))
    until = first or 90
    torch.testing.assert_close(loss[:, :until], full[:, :until], rtol=0, atol=1e-4)
    assert (loss[:, until:] - full[:, until:]).abs().max() > 1e-3


def test_the_largest_future_attention(model):
    generator = torch.Generator().manual_seed(2)
    query, key = (torch.randn(2, 40, heads, 8, generator=generator) for heads in (4, 2))
    found = kept_rows.future_attention(kept_rows.Call(0, query, key, key, key), recent=6, chunk=16)
    for b, h in np.ndindex(2, 2):
        logits = torch.stack([query[b, :, g] @ key[b, :, h].T for g in (2 * h, 2 * h + 1)]) * 8**-0.5
        p = logits.masked_fill(~torch.ones(40, 40).tril().bool(), -torch.inf).softmax(-1)
        expected = p.masked_fill(~torch.ones(40, 40).tril(-6).bool(), 0).amax((0, 1)).log()
        torch.testing.assert_close(found[b, h], expected)


def test_attention_that_masks_hide(model):
    """And scores that age: with a slope of 0 they are themselves, with a steep one a window."""
    generator = torch.Generator().manual_seed(2)
    query, key = (torch.randn(2, 40, heads, 8, generator=generator) for heads in (4, 2))
    call = kept_rows.Call(0, query, key, key, key)
    slopes = torch.tensor([[0.0, 1e3]])
    found = kept_rows.aged(kept_rows.random_scores(0), slopes)(call)
    raw = kept_rows.random_scores(0)(call)
    assert torch.equal(found[:, 0].argsort(-1), raw[:, 0].argsort(-1))
    assert torch.equal(found[:, 1].argsort(-1), torch.arange(40).expand(2, 40))
    mask = best(found, 12, 4)
    window = attend_by("window", 12)(call)
    np.testing.assert_array_equal(mask.to_dense(40)[:, 1], np.broadcast_to(window.to_dense(40)[0, 0], (2, 40, 40)))
    lost = kept_rows.lost_attention(call, [mask, best(found, 40, 4)], chunk=16)
    for h in range(2):
        logits = torch.stack([query[:, :, g] @ key[:, :, h].mT for g in (2 * h, 2 * h + 1)]) * 8**-0.5
        p = logits.masked_fill(~torch.ones(40, 40).tril().bool(), -torch.inf).softmax(-1).sum(0)
        hidden = ~torch.as_tensor(np.asarray(mask.to_dense(40)[:, h])) & torch.ones(40, 40).tril().bool()
        torch.testing.assert_close(lost[0, h], p[hidden].sum())
    assert (lost[1] == 0).all()


def test_needles_lie_where_they_should(tokenizer):
    hay = np.frombuffer(b"." * 3000, np.uint8).astype(np.uint16)
    hay = np.full(3000, tokenizer(".").input_ids[0], np.uint16)
    for depth in (0.0, 0.5, 1.0):
        texts, size = kept_rows.contexts(hay, tokenizer, 400, depth, 3, seed=5)
        assert texts.shape == (3, 400) and size == 6
        for row in texts.tolist():
            words = tokenizer.decode(row)
            code = words[-5:]
            assert code.isdigit() and words[:-5].endswith(" is ") and words.count(code) == 2
            straw = words.split(code)[0].partition("\n")[0]
            room = words.count(".") - 1  # the sentence has one
            assert len(straw) == round(depth * room)
    with pytest.raises(ValueError, match="length must leave room"):
        kept_rows.contexts(hay, tokenizer, 50, 0.5, 1, seed=5)


def test_a_needle_is_found_by_all_its_digits(model):
    texts = torch.randint(256, (3, 30), generator=torch.Generator().manual_seed(3))

    def answered():
        return kept_rows.answered(model, kept_rows.states(model, texts, attend_by("full", 0)), texts, 4)

    assert answered() == [False] * 3
    for _ in range(4):  # what the model says, digit by digit
        with torch.no_grad():
            said = model(input_ids=texts[:, :-1]).logits[:, -4:].argmax(-1)
        texts[:, -4:] = said
    assert answered() == [True] * 3
    texts[1, -4] = (texts[1, -4] + 1) % 256
    assert answered() == [True, False, True]


# ---- the routine ----------------------------------------------------------------------------------------------------
def run(folder, data, *parts, status=0):
    words = [word for part in parts for word in ("--part", part)]
    arguments = ["retrofit", *words, "--size", "tiny", "--device", "cpu", "--data", str(data), "--out", str(folder),
                 "--models", str(folder / "models"), "--commit", "abc"]
    assert main(arguments) == status
    return json.loads((folder / "retrofit.json").read_text())["rows"]


def test_every_part(tmp_path, data, capsys):
    rows = run(tmp_path, data, *retrofit.PARTS)
    shared = [row for row in rows if row["settings"].get("shared")]
    assert len(shared) == 2 * (1 + 2 * 7) and all(np.shape(row["heads"]) == (2, 2) for row in shared)
    assert all(np.mean(row["heads"]) <= row["settings"]["rows"] for row in shared)
    assert any(np.unique(row["heads"]).size > 1 for row in shared)
    by = {(row["settings"]["kind"], row["settings"]["rows"], row["settings"]["seed"]): row for row in rows
          if row not in shared}
    assert len(by) == len(rows) - len(shared) == 1 + 3 + 2 * (4 + 2 * 9)
    assert 0 < by["check", 80, 0]["apart"]["window"] < 1e-4 < by["check", 80, 0]["effect"]
    full = by["full", 0, 0]
    for (kind, budget, seed), row in by.items():
        if kind == "check":
            continue
        assert {x["length"] for x in row["needles"]} == {192, 256} and len(row["needles"]) == 4
        assert set(row["ending"]) == set(corpus.KINDS)
        if kind != "snapkv":
            assert len(row["by_position"]["text"]) == len(row["edges"]) - 1 == 1
        trained = kind in ("input", "value", "aged", "gates", "enforced", "longer", "warm", "tuned")
        assert ("training" in row) == trained
        if trained:
            pieces = {"warm": 3 + 3, "aged": 3 + retrofit.TRIALS, "longer": 3 * retrofit.LONGER}.get(kind, 3)
            assert row["training"]["tokens"] == 256 * pieces and row["training"]["seconds"] > 0
        if kind not in ("full", "int8"):  # INT8 is too near for a model that knows nothing
            assert row["ending"] != full["ending"], (kind, budget, seed)
    assert by["input", 80, 0]["ending"] != by["value", 80, 0]["ending"] != by["value", 80, 1]["ending"]
    capsys.readouterr()
    assert run(tmp_path, data, "gates") == rows
    assert f"{len(retrofit.SEEDS)} of {len(retrofit.SEEDS)} runs are recorded" in capsys.readouterr().out


def test_training_resumes(tmp_path, data, monkeypatch):
    """Cut off in its second step, and with the evaluation to come, it ends as if it had not been."""
    whole = run(tmp_path / "whole", data, "gates")
    real, calls = retrofit.retrofit.train, []

    def train(*arguments, **named):
        assert (named["weight"], named["shrink"]) == (1.0, 3)  # the recipe of the recorded rows, not the default

        def callback(log):
            calls.append(log["step"])
            if len(calls) == 2:
                raise records.OutOfTime

        return real(*arguments, **{**named, "every": 1, "callback": callback})

    monkeypatch.setattr(retrofit.retrofit, "train", train)
    folder = tmp_path / "parts"
    words = ["--size", "tiny", "--device", "cpu", "--data", str(data), "--out", str(folder), "--models",
             str(folder / "models"), "--commit", "abc"]
    assert main(["retrofit", "--part", "gates", *words]) == 3
    parts = run(folder, data, "gates")
    assert calls == [0, 1, 2, 0, 1, 2]
    for a, b in zip(whole, parts):
        assert (a["settings"], a["by_position"], a["ending"]) == (b["settings"], b["by_position"], b["ending"])


def test_budgets_by_one_threshold():
    scores = torch.rand(3, 2, 4, 300, generator=torch.Generator().manual_seed(0))  # layers, texts, heads, keys
    scores[1] += 0.5
    found = kept_rows.budgets_by_threshold(scores, 90)
    assert found.shape == (3, 4) and 89 < found.double().mean() <= 90 and (found[1] > found[0].max()).all()
    older = scores[..., SINKS:-kept_rows.RECENT]
    least = older.flatten().sort().values[-(90 - SINKS - kept_rows.RECENT) * 12 * 2 - 1]
    assert torch.equal(found, (older > least).sum((1, 3)) // 2 + SINKS + kept_rows.RECENT)
    call = kept_rows.Call(2, *(torch.zeros(2, 300, 4, 8) for _ in range(3)), torch.zeros(2, 300, 8))
    mask = attend_by("scores", found, lambda call: scores[2])(call)
    np.testing.assert_array_equal(most_seen(mask), found[2])
    within(lambda _: mask, found)(call)
    with pytest.raises(RuntimeError, match="layer 2: a query sees"):
        within(lambda _: mask, found - (torch.arange(4) == 3).long())(call)


def test_a_wrong_window_is_no_record(tmp_path, data, monkeypatch):
    monkeypatch.setattr(retrofit, "dense_window", lambda n, rows, *others: torch.zeros(1, 1, n, n))
    with pytest.raises(RuntimeError, match="differ from those of a dense mask"):
        run(tmp_path, data, "check")


def test_gates_start_from_scores(model):
    scores = [retrofit.RetentionGate(32, 2, hidden=8) for _ in range(2)]
    for gate in scores:
        torch.nn.init.normal_(gate.proj[-1].weight)
        torch.nn.init.normal_(gate.proj[-1].bias)
    gates = [retrofit.RetentionGate(32, 2, hidden=8) for _ in range(2)]
    retrofit.warmed(gates, scores)
    x = torch.randn(1, 40, 32)
    for gate, known in zip(gates, scores):
        logit, score = ((g.proj(torch.nn.functional.rms_norm(x, (32,), eps=1e-6))) for g in (gate, known))
        torch.testing.assert_close(gate.gain * logit, score - known.proj[-1].bias)


# ---- speed ----------------------------------------------------------------------------------------------------------
def test_speed(tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "STEPS", 2)
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **options: compiled(layer, backend="aot_eager"))
    words = ["retrofit_speed", "--size", "tiny", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc",
             "--lengths", "100", "--repeats", "1"]
    assert main(words) == 0
    rows = json.loads((tmp_path / "retrofit_speed.json").read_text())["rows"]
    found = {(row["settings"]["part"], row["settings"]["peer"]): row for row in rows}
    assert len(found) == len(rows) == 1 + 7 + 5 + 2 and all(row["ms"] > 0 for row in rows)
    assert max(found["check", "gates"]["off"].values()) < 1e-4
    full, ours = (found["decode", peer]["cache_bytes"] for peer in ("sdpa", "gates"))
    assert full == 2 * 2 * 2 * 2 * (100 + 2 * 3) * 8 * 4  # keys and values, layers, rows, heads, tokens, size
    assert ours >= 2 * 2 * 2 * 2 * 256 * 8 * 4
    losses = {peer: found["step", peer]["losses"] for peer in retrofit_speed.PEERS["step"]}
    assert losses["sdpa"] == pytest.approx(losses["flash"]) and losses["sdpa"] != pytest.approx(losses["gates"])
    assert losses["sdpa"] == pytest.approx(losses["gates, open"], abs=0.01)
    assert losses["sdpa"] == pytest.approx(losses["sdpa, compiled"])
    assert losses["gates"] == pytest.approx(losses["gates, compiled"], abs=0.01)  # other noise
    assert main(words) == 0  # nothing is run again
    assert json.loads((tmp_path / "retrofit_speed.json").read_text())["rows"] == rows


def test_speed_notices_what_is_wrong(tmp_path, monkeypatch):
    bench = retrofit_speed.Bench("tiny", "cpu", 1)
    monkeypatch.setattr(retrofit_speed, "set_kept_share", lambda *_: None)
    monkeypatch.setattr(retrofit_speed, "compile_layers", lambda *_: None)
    with pytest.raises(RuntimeError, match=r"gates keep 1\.0000 of 0\.5000"):
        retrofit_speed.check(bench, {"length": 100})
    key = {"part": "decode", "length": 1, "batch": 1}
    rows = [{"settings": {**key, "peer": peer}, "tokens": tokens}
            for peer, tokens in (("gates", [1, 2]), ("gates, graph", [1, 2, 3]), ("sdpa", [5]))]
    assert retrofit_speed.same_tokens(rows)
    rows[0]["tokens"] = [1, 3]
    assert not retrofit_speed.same_tokens(rows)


# ---- pages ----------------------------------------------------------------------------------------------------------
def row(kind, budget, seed, text, code, found=4, **more):
    """With these losses late in the text, and so many of 8 needles found at each depth."""
    about = {"device": "NVIDIA H200", "commit": "abc", "date": "2026-12-01T00:00:00Z", "seconds": 60.0}
    return {"settings": {"kind": kind, "rows": budget, "seed": seed, "needles": 8}, "edges": [0, 1024, 2048, 8192],
            "by_position": {"text": [9.0, text, text], "code": [9.0, code, code]},
            "ending": {"text": text, "code": code}, "needles": [{"length": 8192, "depth": 0.5, "found": found}],
            **about, **more}


def record(better):
    training = {"tokens": 3_000_000, "seconds": 90.0, "curve": []}
    rows = [row("full", 0, 0, 2.0, 1.0, found=8)]
    for budget in (128, 256):
        rows += [row("window", budget, 0, 3.0, 2.0, found=2), row("oracle", budget, 0, 2.5, 1.5)]
        rows += [row("gates", budget, seed, 3.0 - better - seed / 10, 2.0 - better, training=training)
                 for seed in range(3)]
        snapkv = row("snapkv", budget, 0, 2.25, 1.25)
        rows.append({**snapkv, "by_position": {}})
    return {"rows": rows, "device": "NVIDIA H200", "date": "2026-12-01T00:00:00Z"}


def test_what_the_page_says():
    result = record(better=0.3)
    assert pages_retrofit.closed(result, "gates", 256, "text") == pytest.approx([30, 40, 50])
    assert pages_retrofit.closed(result, "oracle", 128, "code") == pytest.approx([50])
    assert pages_retrofit.closed(result, "snapkv", 128, "code") == []
    kind, shares = pages_retrofit.best(result, 256)
    assert kind == "gates" and shares == pytest.approx({"text": 40, "code": 30})
    words = pages_retrofit.page(result)
    first, second = words.split("\n\n")[:2]
    assert first.startswith("**For** models") and "with 128 rows gates" in first and "goal" not in first
    assert first.endswith("with 256 rows gates, base frozen win back 40 % on text and 30 % on code.")
    assert second.startswith("**Not for**")
    assert second.endswith("finds 100 %, the same policy with 256 rows 50 %, and a window of as many 25 %.")
    assert "| gates, base frozen | 2.600 (2.500–2.700), +40 % | 2.600 (2.500–2.700), +40 % |" in words
    assert "| gates, base frozen | 3 | 3.0 | 1.5 |" in words and "| SnapKV | 2.250 / 1.250 / 50 |" in words
    assert words.endswith(pages_retrofit.APPENDIX)


def test_the_page_says_what_was_missed():
    first = pages_retrofit.page(record(better=0.1)).split("\n\n")[0]
    assert first.startswith("**For nobody yet") and "25 %" in first
    assert first.endswith("with 256 rows gates, base frozen win back 20 % on text and 10 % on code.")
    half = [one for one in record(better=0.3)["rows"]
            if (one["settings"]["kind"], one["settings"]["rows"]) != ("gates", 256)]
    half = {"rows": [*half, row("gates", 256, 0, 2.9, 1.9)]}
    first, second = pages_retrofit.verdict(half).split("\n\n")
    assert first.startswith("**For** models") and "with 128 rows gates, base frozen win back 40 %" in first
    assert first.endswith("The goal was 25 % with 256 rows: with 256 rows gates, base frozen win back 10 % on text "
                          "and 10 % on code.")
    assert "the same policy with 128 rows" in second
    partial = {"rows": record(0.3)["rows"][:1]}
    assert pages_retrofit.verdict(partial).startswith("The record does not hold")


def test_nothing_is_claimed_without_a_record(tmp_path):
    for name in ("retrofit", "retrofit_speed"):
        for piece in REPORTS[name].pieces:
            assert REPORTS[name].made(piece, []) == ""


def test_the_chart_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    REPORTS["retrofit"].chart(record(0.3), tmp_path / "retrofit.png")
    assert (tmp_path / "retrofit.png").stat().st_size > 10000
