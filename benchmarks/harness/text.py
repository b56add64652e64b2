"""Training text available on every machine: the topics of Python's ``help()`` and the sources of the standard library.

One file in ``HELD_OUT`` is held out, chosen by a checksum of its path. A needle is a line about a random name; a second
line repeats it, and only the first line tells how to complete it.
"""
import functools
import sysconfig
import zlib
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor

HELD_OUT = 10
SLOT = 32  # bytes of a line with a needle
LINE = b"\n# the code of ____ is #####   \n"  # letters and digits are filled in
assert len(LINE) == SLOT
NAME, CODE = slice(LINE.index(b"_"), LINE.rindex(b"_") + 1), slice(LINE.index(b"###"), LINE.rindex(b"#") + 1)


class Text(NamedTuple):
    training: Tensor  # uint8, one file after the other
    held_out: list[Tensor]
    checksum: int


@functools.cache
def standard_library() -> Text:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {f"topics/{name}": text.encode() for name, text in topics.items()}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.parts[0] != "site-packages":
            files[str(name)] = path.read_bytes()
    return split(files)


def split(files: dict[str, bytes]) -> Text:
    parts: tuple[list[bytes], list[bytes]] = [], []
    for name, content in files.items():
        parts[zlib.crc32(name.encode()) % HELD_OUT == 0].append(content)
    training = b"\n".join(parts[0])
    return Text(tensor(training), [tensor(x) for x in parts[1]], zlib.crc32(training))


def tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def first_bytes(text: Text, length: int, count: int) -> Tensor:
    """At most ``(count, length)``: beginnings of held-out files that are long enough, evenly spread over these
    files."""
    long = [x[:length] for x in text.held_out if len(x) >= length]
    if not long:
        raise ValueError(f"no held-out file has {length} bytes")
    return torch.stack(long[::max(1, len(long) // count)][:count]).long()


def pieces(training: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    """``(count, length)`` from anywhere in a text that is on the device."""
    first = torch.randint(len(training) - length + 1, (count, 1), generator=generator, device=generator.device)
    return training[first + torch.arange(length, device=first.device)].long()


def lines(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """``(*shape, SLOT)``: needles with random names and codes."""
    device = generator.device
    found = tensor(LINE).long().to(device).expand(*shape, SLOT).clone()

    def fill(where: slice, low: int, high: int) -> None:
        size = where.stop - where.start
        found[..., where] = torch.randint(low, high + 1, (*shape, size), generator=generator, device=device)

    fill(NAME, ord("a"), ord("z"))
    fill(CODE, ord("0"), ord("9"))
    return found


def planted(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``text (B, n)`` with ``count`` needles, each at two random places, and the positions ``(B, count, 5)`` of the
    second codes."""
    batch, length = text.shape
    slots = torch.rand(batch, length // SLOT, generator=generator, device=text.device).argsort(1)[:, :2 * count]
    pairs = slots.unflatten(1, (count, 2)).sort(-1).values  # first line, second line
    said = lines((batch, count), generator)
    at = SLOT * pairs[..., None] + torch.arange(SLOT, device=text.device)  # (B, count, 2, SLOT)
    found = text.scatter(1, at.flatten(1), said[:, :, None].expand(-1, -1, 2, -1).flatten(1))
    return found, at[:, :, 1, CODE]
