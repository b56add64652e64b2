"""Every kernel compiles for every supported architecture without excessive spills; the cache notices changes; missing
headers give a helpful error. Needs NVRTC and the CUDA headers, no GPU."""
import itertools
import re
import struct
from typing import Any

import pytest

from cupy_dma.backends.cuda.attention import (
    flash_decode,
    sm90,
    sm90_backward,
    sm90_stored,
    sm90_tiles,
    split,
    tiles,
)
from cupy_dma.backends.cuda.decode import chunk, codes, step
from cupy_dma.backends.cuda.runtime import configs, jit, sums, warmup
from cupy_dma.backends.cuda.runtime.params import Params
from cupy_dma.backends.cuda.select import last_queries, prefix
from tests import slow

try:
    jit.find_headers()
    reason = ""
except jit.CompileError as error:
    reason = str(error)
needs_compiler = pytest.mark.skipif(bool(reason), reason=reason)

ARCHITECTURES = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100": 227, "sm_120": 99}  # KiB shared

# What make test compiles; make test-all compiles the rest of ``chosen``. The portable kernels are the same text on
# every architecture, so sm_80, the oldest, gets all of them; a newer one adds its own tiles and the paths that only it
# takes: clusters and the kernels of kernels/sm90 on sm_90a, the smallest shared memory and the newest assembler on
# sm_120. sm_86 and sm_89 share the tiles of sm_120, and sm_100 those of sm_90a.
# Sources that make test leaves out unless they have changed: 10 s and more each.
LONG = ("decode/step.cu", "sm80/forward.cu", "sm80/backward_dkv.cu", "sm80/backward_dq.cu")
QUICK_HOPPER = {("contiguous", 128), ("bits", 64)}  # keys, head dim

# Compiling every combination of the Hopper kernels' options would take too long. Each pair of options is compiled
# together at least once, and so is every tile shape in use.
HOPPER_DIMS = (64, 128, 192, 256)
SUPERSETS = {("intervals with softcap", 128), ("intervals with softcap", 192), ("contiguous with bias", 128),
             ("contiguous with bias", 192), ("contiguous with bias and softcap", 64),
             ("contiguous with bias and softcap", 256)}  # skipped: other keys compile these tiles
FEATURES = ((True, 1, True), (False, 1, False), (True, 0, False), (False, 0, True))  # causal, bias, softcap


def case(*values, quick: bool):
    return pytest.param(*values, marks=() if quick else pytest.mark.slow)


def specialisations(limit: int, every: bool) -> list[jit.Config]:
    """Each kernel with each of its options at least once; ``every``: also head dims of each tile shape, and an odd
    one."""
    found: list[jit.Config] = [configs.LayoutConfig(element) for element in configs.ELEMENTS.values()]
    found += [configs.SelectConfig(*flags) for flags in itertools.product((False, True), repeat=3)]
    found += [configs.DocumentConfig(kind) for kind in ("int", "long long")]
    found += [sums.SumConfig(element) for element in configs.ELEMENTS.values()]
    found += [configs.ListConfig(causal, 64) for causal in (False, True)]
    found += [configs.DenseConfig(queries) for queries in (8, 32, 128)] + [configs.DenseSupersConfig()]
    found += [configs.LifetimesConfig(causal) for causal in (False, True)]
    found.append(configs.LifetimesConfig(False, sequences=True))
    found += [configs.ListConfig(False, 64, sequences=True), configs.SequenceConfig(causal=True)]
    found += [configs.ScoreConfig("__half", "float", "float", 64, 1, 1, True, True, False, False),
              configs.ScoreConfig(*("__nv_bfloat16",) * 3, 128, 8, 8, True, True, False, True),
              configs.ScoreConfig("__half", "__half", "float", 64, 32, 8, True, False, True, True),
              configs.ScoreConfig("__nv_bfloat16", "__nv_bfloat16", "__half", 128, 8, 8, True, False, True, False),
              configs.ScoreConfig("float", "__half", "float", 33, 3, 2, False, True, False, False)]
    size = limit * 1024
    dims = {64: "KEYS_LISTED", 128: "KEYS_LISTED", 192: "KEYS_SHARED", 256: "KEYS_LISTED", 96: "KEYS_CONTIGUOUS",
            1: "KEYS_LISTED"}
    for i, (head_dim, keys) in enumerate(dims.items() if every else [*dims.items()][1:6:4]):
        elements = ("__half", "__nv_bfloat16")[::-1 if i % 2 else 1]
        found += attention(*elements, head_dim, size, 1 if head_dim % 64 else 2, keys,
                           ("KEYS_LISTED", "KEYS_CONTIGUOUS", "KEYS_SHARED")[i % 3], dbias=i % 2 == 0,
                           bias=head_dim != 96, softcap=head_dim in (192, 1))
        if head_dim in (1, 128, 256):
            found += dense_specialisations("__nv_bfloat16", head_dim, size, ("float", "__nv_bfloat16", "__half")[i % 3],
                                           bits=head_dim != 1)
    dims = {33: "KEYS_LISTED", 128: "KEYS_LISTED", 256: "KEYS_SHARED", 192: "KEYS_CONTIGUOUS"}
    for head_dim, keys in dims.items() if every else [*dims.items()][1:3]:
        found += attention("float", "float", head_dim, size, 2, keys,
                           "KEYS_CONTIGUOUS" if keys == "KEYS_CONTIGUOUS" else "KEYS_LISTED")
        if head_dim == 128 or (head_dim == 256 and limit > 99):
            found += dense_specialisations("float", head_dim, size, "__half" if head_dim == 256 else "float",
                                           bits=head_dim != 128)
    found += sequences(size) + decoding()[::2 if every else 4]
    found += [configs.BackwardPreprocessConfig("float", 100, True),
              configs.BackwardPreprocessConfig("__half", 33, False),
              configs.BackwardReduceConfig("float", 100, True, False, True, True, True),
              configs.BackwardReduceConfig("__half", 33, False, False, True, True, True),
              configs.BackwardReduceConfig("__nv_bfloat16", 128, True, True, True, False, False),
              configs.BackwardReduceConfig("__nv_bfloat16", 128, True, False, True, True, True, bits=True),
              configs.ScoreBackwardConfig("__nv_bfloat16", "float", "float", 128, 8, 8),
              configs.ScoreBackwardConfig("float", "__half", "__nv_bfloat16", 33, 20, 8)]
    return found


def attention(forward: str, backward: str, head_dim: int, limit: int, heads: int, keys: str, keys_of_dkv: str,
              dbias: bool = True, bias: bool = True, softcap: bool = False) -> list[jit.Config]:
    """The attention kernels for these elements of the forward and of the backward pass."""
    size, plain = configs.ELEMENT_BYTES[forward], keys == "KEYS_CONTIGUOUS"
    vector, options = head_dim * size % 16 == 0, {"causal": plain, "bias": bias, "softcap": softcap}
    return [
        configs.ForwardConfig(forward, head_dim, vector, heads, *tiles.tile_shape(head_dim, limit, size=size), keys,
                              **options),
        configs.BackwardDqConfig(backward, head_dim, vector, heads, *tiles.backward_dq_tile(head_dim, limit, size),
                                 keys, **options),
        configs.BackwardDkvConfig(backward, head_dim, vector, *tiles.backward_dkv_tile(head_dim, limit, size),
                                  keys_of_dkv, intervals=not plain, dim_slices=2 if head_dim > 128 else 1, dkey=True,
                                  dvalue=True, dbias=dbias, **options)]


def dense_specialisations(element: str, head_dim: int, limit: int, bias: str, bits: bool) -> list[jit.Config]:
    """The attention kernels with and without a dense mask, and with a dense bias; the key gradients with a dense
    mask."""
    size = configs.ELEMENT_BYTES[element]
    vector = head_dim * size % 16 == 0
    rest = ("KEYS_LISTED" if bits else "KEYS_CONTIGUOUS", not bits, configs.BIAS_DENSE, head_dim == 128)
    return [
        configs.ForwardConfig(element, head_dim, vector, 2,
                              *tiles.tile_shape(head_dim, limit, size=size, dense_bias=bias), *rest, bits, bias),
        configs.BackwardDqConfig(element, head_dim, vector, 1,
                                    *tiles.backward_dq_tile(head_dim, limit, size, bias), *rest, bits, bias,
                                    dbias=True),
        configs.BackwardDbiasConfig(element, head_dim, vector, 1,
                                    *tiles.backward_dbias_tile(head_dim, limit, size, bias), "KEYS_CONTIGUOUS",
                                    *rest[1:], bits, bias, intervals=not bits, sum_keys=head_dim == 256),
        *(configs.BackwardDkvConfig(
            element, head_dim, vector, *tiles.backward_dkv_tile(head_dim, limit, size, dense), rest[0],
            False, not bits, configs.BIAS_DENSE if dense else configs.BIAS_NONE, False, 2 if head_dim > 128 else 1,
            True, True, False, bits, dense or "float") for dense in (None, bias))]


def sequences(limit: int) -> list[jit.Config]:
    """The attention kernels with packed sequences and paged KV caches."""
    found: list[jit.Config] = []
    element = "__nv_bfloat16"
    for keys, page_sizes in (("KEYS_CONTIGUOUS", (0, 16)), ("KEYS_LISTED", (0, 7)), ("KEYS_SHARED", (16,))):
        plain = keys == "KEYS_CONTIGUOUS"
        rest = (keys, plain, configs.BIAS_OF_KEYS, False, False, "float", True)
        found += [configs.ForwardConfig(element, 128, True, 2, *tiles.tile_shape(128, limit), *rest, page_size)
                  for page_size in page_sizes]
        tile = tiles.backward_dq_tile(128, limit)
        found.append(configs.BackwardDqConfig(element, 128, True, 2, *tile, *rest))
        if keys != "KEYS_SHARED":
            found.append(configs.BackwardDkvConfig(element, 128, True, *tiles.backward_dkv_tile(128, limit), keys,
                                                   not plain, plain, configs.BIAS_OF_KEYS, False, 1, True, True, True,
                                                   sequences=True))
    return [*found, configs.BackwardReduceConfig(element, 128, True, False, True, True, True, True)]


def of_rows(dtype: str, size: int, rows: int, delay: bool | None = None) -> tuple[Any, ...]:
    """The fields that decode kernels share; by default only those of head dim 33 have a delay."""
    return (configs.ELEMENTS[dtype], size, size, size % 8 == 0, rows, split.WARPS,
            size == 33 if delay is None else delay, split.min_blocks(size, size, dtype, rows))


def decoding() -> list[jit.Config]:
    """The decode kernels: rows of each length, with one and two operands of query heads."""
    found: list[jit.Config] = [last_queries.LastQueriesConfig(intervals=intervals) for intervals in (False, True)]
    for dtype, size, rows in (("bfloat16", 64, 2), ("float16", 128, 16), ("bfloat16", 128, 4), ("float16", 256, 8),
                              ("float32", 64, 16), ("float32", 128, 2), ("float16", 33, 3)):
        common = of_rows(dtype, size, rows)
        found += [step.StepConfig(*common, attend, 1) for attend in (True, False)]
        found += [step.StepConfig(*common, True, 1, *rest) for rest in ((True, False), (False, True), (True, True))]
        found += [flash_decode.FlashDecodeConfig(*common[:-1], min(3, common[-1]), *rest) for rest in (
            (True, rows > 2, False, True), (False, True, rows == 4, True), (False, False, rows == 3, False))]
    for dtype, size, rows, tokens, slots in (("bfloat16", 64, 16, 8, False), ("float16", 128, 8, 4, True),
                                             ("bfloat16", 128, 16, 8, False), ("float16", 256, 8, 4, False),
                                             ("float32", 64, 16, 2, False), ("float32", 256, 8, 1, True),
                                             ("float16", 33, 12, 4, True)):
        common = of_rows(dtype, size, rows)
        found += [step.StepConfig(*common, True, 1, size == 64, ragged, slots, True, tokens)
                  for ragged in (False, True)]
        found.append(step.StepConfig(*common, slots, 1, slots=True))  # of one token
        found.append(step.PlanConfig(*common[:4], 1, step.PLAN_WARPS, False, 1, size > 64, slots, size == 33))
    for storage, dtype, size, rows, tokens in ((1, "bfloat16", 128, 4, 1), (2, "float16", 128, 16, 4),
                                               (2, "bfloat16", 64, 8, 1), (1, "float16", 256, 8, 1),
                                               (2, "float32", 128, 4, 1), (2, "bfloat16", 33, 2, 2)):
        common = of_rows(dtype, size, rows, delay=False)
        found += [step.StepConfig(*common, True, 1, planned=tokens > 1, tokens=tokens, storage=storage),
                  codes.QuantizeConfig(common[0], size, size, storage)]
    found += [chunk.ChunkConfig(chunk.UNITS[unit], 0) for unit in (16, 4, 2)]
    found += [chunk.ChunkConfig(chunk.UNITS[unit], storage, configs.ELEMENTS[dtype])
              for unit, storage, dtype in ((16, 1, "bfloat16"), (16, 2, "float16"), (4, 2, "float32"),
                                           (1, 1, "bfloat16"))]
    return [*found, step.PlanConfig(*common[:4], 1, step.PLAN_WARPS, False, 1, False, False, False, storage=2)]


def clusters() -> list[jit.Config]:
    """Steps of decoding with few heads, on GPUs that have clusters of blocks."""
    shapes = (("bfloat16", 64, 2, True), ("float16", 128, 16, True), ("float16", 33, 3, True),
              ("float32", 256, 8, True), ("float32", 128, 2, False))
    found = [step.StepConfig(configs.ELEMENTS[dtype], size, size, size % 8 == 0, rows, step.CLUSTER_WARPS,
                             size == 33, 1, attend, step.CLUSTER) for dtype, size, rows, attend in shapes]
    several = (("bfloat16", 64, 16, 8), ("float16", 128, 8, 4), ("float32", 128, 8, 4))
    return found + [step.StepConfig(configs.ELEMENTS[dtype], size, size, True, rows, step.CLUSTER_WARPS, False, 1, True,
                                    step.CLUSTER, planned=True, tokens=tokens) for dtype, size, rows, tokens in several]


def chosen(arch: str) -> list[jit.Config]:
    """What to compile for an architecture: everything for sm_90a, every kernel with every type for the others.
    Architectures with equal shared memory have the same tiles and share the remaining configurations."""
    limit = ARCHITECTURES[arch]
    found = specialisations(limit, every=arch == "sm_90a")
    if arch == "sm_90a":
        sums = [sm90.CombineConfig("__nv_bfloat16", head_dim, heads, rows)
                for head_dim, heads, rows in ((64, 2, 192), (40, 1, 192), (128, 3, 192), (256, 2, 128))]
        return [*found, *clusters(), *sums]
    alike = [other for other, size in ARCHITECTURES.items() if size == limit and other != "sm_90a"]
    first = {(config.source, getattr(config, "element", "")): config for config in reversed(found)}.values()
    served = set(chosen("sm_90a"))
    return [config for i, config in enumerate(found)
            if config in first or (alike[i % len(alike)] == arch and config not in served)]


def allowed_spills(config: jit.Config, arch: str) -> int:
    """The number of bytes that a kernel may spill."""
    if config.source in ("decode/step.cu", "decode/flash_decode.cu") and config.element != "float" and arch == "sm_90a":
        # Decode steps: a delay at D 256 spills 16, many rows of several tokens at D 128 spill 16.
        return 32 if getattr(config, "delay", False) or getattr(config, "planned", False) else 0
    if config.source == "sm90/combine.cu":
        return 0
    if config.source == "sm80/backward_dkv.cu":
        return 700  # two accumulators of all of D
    return 320 if getattr(config, "sequences", False) else 256  # bounds beside what every tile knows: 282, NVRTC 12.9


@needs_compiler
@pytest.mark.parametrize(("arch", "source"), [
    case(arch, source, quick=arch == "sm_80" and (source not in LONG or source in slow.changed_kernels()))
    for arch in ARCHITECTURES for source in sorted({config.source for config in chosen(arch)})])
def test_every_kernel_compiles_without_large_spills(arch, source):
    for config in [config for config in chosen(arch) if config.source == source]:
        compiled = jit.compile(config, arch)
        assert 0 < compiled.registers <= 255, config
        assert compiled.spill_bytes <= allowed_spills(config, arch), \
            f"{config} spills {compiled.spill_bytes} bytes on {arch}"
        assert compiled.path.read_bytes()[:4] == b"\x7fELF"


@needs_compiler
@pytest.mark.parametrize(("keys", "head_dim", "heads"), [
    case(keys, head_dim, 1 + (i + j) % 2, quick=(keys, head_dim) in QUICK_HOPPER)
    for i, (keys, head_dims) in enumerate(sm90_tiles.TILES.items()) for j, head_dim in enumerate(head_dims)
    if (keys, head_dim) not in SUPERSETS])
def test_hopper_kernels_keep_their_mmas_asynchronous(keys, head_dim, heads):
    bits, bias, contiguous = keys == "bits", "intervals" in keys or "bias" in keys, "contiguous" in keys
    variants = [(int(bias), "float", not bits, bits, "softcap" in keys)]
    if bits:  # with a dense bias; with that and intervals
        variants += [(configs.BIAS_DENSE, "__nv_bfloat16", False, masked, False) for masked in (True, False)]
        del variants[HOPPER_DIMS.index(head_dim) % 3]
    elif head_dim == 64 and keys == "intervals":
        variants.append((configs.BIAS_OF_KEYS, "float", True, False, True))
    for tile in sm90_tiles.TILES[keys][head_dim]:
        for kind, element, sequences, masked, softcap in variants:
            check_hopper_kernel(sm90.HopperForwardConfig(
                "__nv_bfloat16", head_dim, heads, *tile, "KEYS_CONTIGUOUS" if contiguous else "KEYS_LISTED", contiguous,
                kind, softcap, masked, element, sequences, contiguous, True, runs=bits))


@needs_compiler
@pytest.mark.parametrize(("keys", "causal", "head_dim"), [
    ("contiguous", True, 128),
    *(case(keys, False, head_dim, quick=False) for keys, head_dim in (
        ("contiguous", 64), ("intervals", 128), ("intervals with softcap", 64), ("contiguous with bias", 64),
        ("contiguous with bias and softcap", 128)))])
def test_split_hopper_kernels_do_so_too(keys, causal, head_dim):
    listed, softcap = "intervals" in keys, "softcap" in keys
    for tile in sm90_tiles.TILES[keys][head_dim]:
        check_hopper_kernel(sm90.HopperForwardConfig(
            "__half", head_dim, 2, *tile, "KEYS_LISTED" if listed else "KEYS_CONTIGUOUS", causal,
            int(listed or "bias" in keys), softcap, False, "float", False, not listed, True, False, split=True))


def hopper_gradients(head_dim: int, features: tuple[bool, int, bool], delay: bool = False) -> dict[str, Any]:
    """The fields shared by both kernels."""
    return {"element": "__nv_bfloat16", "head_dim": head_dim, "delay": delay,
            **dict(zip(("causal", "bias", "softcap"), features))}


@needs_compiler
@pytest.mark.parametrize(("head_dim", "keys", "sequences", "heads", "features", "delay"), [
    case(head_dim, keys, sequences, heads, features, delay, quick=head_dim == 128 and heads == 2 and not sequences)
    for i, head_dim in enumerate(HOPPER_DIMS) for keys, sequences, heads, features, delay in [
        ("KEYS_CONTIGUOUS", False, 2, FEATURES[i], False), ("KEYS_LISTED", False, 2, FEATURES[i - 1], i == 2),
        ("KEYS_LISTED", True, 2, FEATURES[i - 2], False), ("KEYS_SHARED", True, 2, FEATURES[i - 3], i == 0),
        ("bits", False, (1, 16)[i % 2], FEATURES[1 + 2 * (i // 2)], False)]
    ] + [case(dim, "KEYS_LISTED", False, 2, FEATURES[0], False, quick=False) for dim in (40, 96)])
def test_hopper_query_gradients_do_so_too(head_dim, keys, sequences, heads, features, delay):
    check_asynchronous(sm90_backward.HopperBackwardDqConfig(
        **hopper_gradients(head_dim, features, delay), heads=heads, block_m=sm90_backward.BLOCK_M,
        block_n=sm90_backward.dq_block_n(head_dim), stages=sm90_backward.dq_stages(head_dim),
        keys="KEYS_LISTED" if keys == "bits" else keys, sequences=sequences, bits=keys == "bits"), allowed=256)


@needs_compiler
@pytest.mark.parametrize(("head_dim", "keys", "intervals", "sequences", "dquery", "features", "delay"), [
    case(head_dim, *kind, head_dim <= sm90_backward.MAX_NARROW_DIM and (i + j) % 2 == 0, FEATURES[(i + j // 2) % 4],
         j == 0 and i < 2, quick=head_dim == 128 and j in (0, 3))
    for i, head_dim in enumerate(HOPPER_DIMS) for j, kind in enumerate([
        ("KEYS_CONTIGUOUS", False, False), ("KEYS_LISTED", True, False), ("KEYS_CONTIGUOUS", True, False),
        ("KEYS_SHARED", True, False), ("KEYS_CONTIGUOUS", False, True), ("KEYS_LISTED", True, True)])
    ] + [case(dim, "KEYS_LISTED", True, False, True, FEATURES[0], False, quick=False) for dim in (40, 96)
    ] + [case(dim, "bits", False, False, False, FEATURES[1 + 2 * (i % 2)], False, quick=False)
         for i, dim in enumerate(HOPPER_DIMS)])
def test_hopper_key_gradients_are_asynchronous(head_dim, keys, intervals, sequences, dquery, features, delay):
    """Steps of 128 queries spill a lot: 1056 bytes in one pass with intervals, a bias and a softcap, 1184 with a bias
    delay too."""
    bits = keys == "bits"
    narrow = keys != "KEYS_CONTIGUOUS" or delay
    check_asynchronous(sm90_backward.HopperBackwardDkvConfig(
        **hopper_gradients(head_dim, features, delay), keys="KEYS_LISTED" if bits else keys, intervals=intervals,
        block_q=sm90_backward.block_q(head_dim, dquery, narrow), stages=sm90_backward.STAGES,
        key_stages=sm90_backward.key_stages(head_dim, dquery), sequences=sequences, bits=bits, dquery=dquery),
        allowed=256 if bits else 1184 if delay and dquery else 1056 if head_dim <= 64 else 352 if dquery else 256)


@needs_compiler
@pytest.mark.parametrize(("head_dim", "dquery"), [
    case(64, True, quick=True), case(64, False, quick=False), case(128, True, quick=False),
    case(256, False, quick=False)])
def test_the_plan_of_tiles_spills_nothing(head_dim, dquery):
    check_asynchronous(sm90_backward.HopperBackwardDkvPlanConfig(
        **hopper_gradients(head_dim, FEATURES[3]), keys="KEYS_SHARED", intervals=False, dquery=dquery, sequences=False,
        block_q=sm90_backward.block_q(head_dim, dquery, True), stages=sm90_backward.STAGES, bits=False,
        key_stages=sm90_backward.key_stages(head_dim, dquery)), allowed=0)


@needs_compiler
@pytest.mark.parametrize(("head_dim", "heads", "features", "delay"), [
    case(128, 2, FEATURES[0], False, quick=True), case(64, 1, FEATURES[1], True, quick=False),
    case(40, 4, FEATURES[2], False, quick=False), case(128, 4, FEATURES[3], False, quick=False),
    case(128, 1, FEATURES[0], True, quick=False)])
def test_those_that_store_ds_do_so_too(head_dim, heads, features, delay):
    config = sm90_backward.HopperBackwardDkvConfig(
        **hopper_gradients(head_dim, features, delay), keys="KEYS_LISTED", intervals=True, block_q=64,
        stages=sm90_backward.STAGES, key_stages=2, sequences=False, bits=False, dquery=False, stored=True)
    check_asynchronous(config, allowed=256)
    check_asynchronous(sm90_stored.HopperBackwardDqStoredConfig(
        "__nv_bfloat16", head_dim, heads, sm90_stored.BLOCK_N, sm90_stored.stages(head_dim)), allowed=0)


def check_hopper_kernel(config: sm90.HopperForwardConfig) -> None:
    # Spills of the producer, if it has 32 registers; its loop over whole blocks spills little. A dense bias occupies
    # registers beside the logits, and a softcap needs code for all its formulas.
    large, dense = config.block_m * config.block_n > 16384, config.bias == configs.BIAS_DENSE
    check_asynchronous(config, allowed=2048 if config.softcap else 800 if large else 320 if dense else 256)


def check_asynchronous(config: Any, allowed: int) -> None:
    """The assembler serializes no MMAs and spills at most ``allowed`` bytes."""
    _, log = jit._run_nvrtc(config.prelude() + jit.source_text(config.source), config, "sm_90a")
    assert "Used" in log  # the assembler's log is there
    assert "serialized" not in log, f"{config}: {log}"
    assert config.shared_bytes <= 227 * 1024
    assert jit._read_resources(log)["spill_bytes"] <= allowed, config


@pytest.mark.parametrize("element", ["__half", "float"])
@pytest.mark.parametrize("limit", sorted(set(ARCHITECTURES.values())))
@pytest.mark.parametrize("bias", [None, "__half", "float"])
def test_tiles_fit_into_shared_memory(limit, element, bias):
    size, limit = configs.ELEMENT_BYTES[element], limit * 1024
    kind = configs.BIAS_OF_KEYS if bias is None else configs.BIAS_DENSE
    of_bias = {"bits": True, "bias_element": bias or "float"}
    for head_dim in range(1, 257):
        shapes = [(configs.ForwardConfig, tiles.tile_shape(head_dim, limit, count, size, bias))
                  for count in ("", "few", "many")]
        if (gradients := size == 2 or bias is None or limit > 99 * 1024 or head_dim <= 240):
            shapes.append((configs.BackwardDqConfig, tiles.backward_dq_tile(head_dim, limit, size, bias)))
        for heads in (1, 2, 3, 4):
            for config_of, shape in shapes:
                config = config_of(element, head_dim, True, heads, *shape, "KEYS_LISTED", False, kind, False,
                                   bits=heads != 3, bias_element=bias or "float")
                assert config.shared_bytes <= limit
                assert config.queries >= (8 if size == 2 else 4) and shape.block_m % (16 * shape.warps) == 0
        if not gradients:
            continue
        tile = tiles.backward_dkv_tile(head_dim, limit, size, bias)
        key = configs.BackwardDkvConfig(element, head_dim, True, *tile, "KEYS_LISTED", True, False, kind, False, 1,
                                        True, True, True, **of_bias)
        assert key.shared_bytes <= limit and tile.block_n == 16 * tile.warps
        if bias is not None:
            shape = tiles.backward_dbias_tile(head_dim, limit, size, bias)
            whole = configs.BackwardDbiasConfig(element, head_dim, True, 1, *shape, "KEYS_LISTED", False, kind, False,
                                               **of_bias)
            assert whole.shared_bytes <= limit and shape.block_m % (16 * shape.warps) == 0


@pytest.mark.parametrize("tile", [tiles.backward_dq_tile, tiles.backward_dkv_tile])
def test_gradients_that_do_not_fit_are_refused(tile):
    """float32 with large head dims and a dense bias, on GPUs with 99 KB of shared memory."""
    with pytest.raises(NotImplementedError, match=r"^backend='cuda' cannot do this: .*head dim 241.*float16"):
        tile(241, 99 * 1024, 4, "float")


def test_missing_headers_are_named(monkeypatch):
    monkeypatch.setattr(jit, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(jit, "_header_candidates", lambda: [])
    with pytest.raises(jit.CompileError, match=r"crt/mma.h.*pip install 'cuda-toolkit\[cudart,nvcc\]==12"):
        jit.find_headers.__wrapped__()


def test_headers_of_the_compilers_version_are_preferred(monkeypatch, tmp_path):
    def headers(name, version, crt=True):
        (tmp_path / name / "crt").mkdir(parents=True)
        for file in ("cuda_fp16.h", "mma.h"):
            (tmp_path / name / file).touch()
        (tmp_path / name / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
        if crt:
            (tmp_path / name / "crt" / "mma.h").touch()
        return tmp_path / name

    wrong, near, same = headers("wrong", 11080), headers("near", 12040), headers("same", 12090)
    bare = headers("bare", 12090, crt=False)
    monkeypatch.setattr(jit, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(jit, "_header_candidates", lambda: [wrong, near, same])
    assert jit.find_headers.__wrapped__() == (same,)
    monkeypatch.setattr(jit, "_header_candidates", lambda: [bare, near])
    assert jit.find_headers.__wrapped__() == (near,)
    monkeypatch.setattr(jit, "_header_candidates", lambda: [wrong])
    with pytest.raises(jit.CompileError):
        jit.find_headers.__wrapped__()


def test_the_params_struct_is_read_from_the_source():
    members = "const float* a;  // first; second", "int b, c[3];", "long long d;", "float e;", "int f, g;"
    params = Params("struct P {\n    " + "\n    ".join(members) + "\n};\n", "P")
    assert params.names == [*"abcdefg"]
    assert [params.types[name] for name in "acd"] == ["const float*", "int[3]", "long long"]
    packed = params.pack(a=1, b=-2, c=struct.pack("=2i", 3, 4), d=5, e=0.5, f=6, g=7)
    assert packed == struct.pack("=Qiiiiqfiii", 1, -2, 3, 4, 0, 5, 0.5, 6, 7, 0)
    assert params.pack_some({"a": 1}, {"d": 5}) == struct.pack("=Qiiiiqfiii", 1, 0, 0, 0, 0, 5, 0, 0, 0, 0)
    with pytest.raises(KeyError):
        params.pack(a=1)
    for members in ("long long a[3]", "int a[N]"):
        with pytest.raises(ValueError, match="arrays of int"):
            Params(f"struct P {{\n    {members};\n}};\n", "P")


def test_every_kernel_waits_for_those_ahead_of_it():
    """A kernel that does not wait could overtake earlier ones. The emulator watches accesses before the wait."""
    for path in jit.kernels_directory().rglob("*.cu"):
        text = path.read_text()
        kernels = re.findall(r"__global__\s[^{;]*\{.*?\n\}", text, re.DOTALL)
        assert len(kernels) == text.count(" __global__ ") > 0
        for kernel in kernels:
            assert "\n    wait_for_earlier_kernels();\n" in kernel, f"{path.name}: {kernel[:99]}"


def test_selection_chunks_are_powers_of_two():
    assert {prefix.selection_chunk(n) for n in (1, 1000, 10**7)} <= {2**i for i in range(10, 30)}
    assert [prefix.selection_chunk(n) for n in (32768, 131072, 2**20)] == [2048, 4096, 16384]


def test_lines_keep_their_numbers():
    """Lines named by a compiler or profiler match the file, also after an include."""
    file, number, seen = "", 0, set()
    for line in jit.source_text("sm80/forward.cu").splitlines():
        number += 1
        marker = re.fullmatch(r'#line (\d+) "(.*)"', line)
        if marker:
            file, number = marker[2], int(marker[1]) - 1
        elif line:
            assert (jit.kernels_directory() / file).read_text().splitlines()[number - 1] == line
            seen.add(file)
    assert seen >= {"sm80/forward.cu", "common/arch.cuh", "common/mask.cuh", "common/softmax.cuh",
                    "common/smem_rows.cuh"}


# ---- warmup compiles the kernels that calls need, for any head dim, group and architecture ----
DTYPES = ("float16", "bfloat16", "float32")


def test_shared_memory_of_each_architecture():
    assert {arch: warmup.shared_memory_limit(arch) // 1024 for arch in ARCHITECTURES} == ARCHITECTURES


@needs_compiler
def test_architectures_are_named_as_devices_are():
    found = jit.architectures()
    assert set(ARCHITECTURES) <= set(found)
    assert "sm_75" not in found and "sm_90" not in found


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_head_dim_has_its_tiles(arch):
    configs = [job.args[0] for _, job in warmup.jobs(arch, None, tuple(range(1, 257)), DTYPES, (1, 3, 8))]
    limit = warmup.shared_memory_limit(arch)
    assert {config.head_dim for config in configs if hasattr(config, "head_dim")} == set(range(1, 257))
    for config in configs:
        size = 4 if getattr(config, "element", "") == "float" else 2
        if getattr(config, "vector", False) or config.source.startswith("sm90/"):
            assert config.head_dim * size % 16 == 0, config  # as rows_aligned requires
        if config.source == "sm80/forward.cu":
            assert config.shared_bytes <= limit, config


@pytest.mark.parametrize("head_dim", [1, 64, 128, 256])
@pytest.mark.parametrize("group", [1, 7, 16, 17, 32, 100])
def test_steps_are_those_of_the_cache(head_dim, group):
    for dtype in DTYPES:
        plan = step.split((1, 1, 64, head_dim), head_dim, group, dtype, 132, clusters=True)
        every = warmup.decode_configs((head_dim,), (dtype,), (group,), clusters=True)
        found = [config for config in every if isinstance(config, step.StepConfig)]
        assert len(every) == len(found) + 1
        assert {config.rows for config in found} == {plan.rows}
        assert len(found) == (2 if plan.sets == 1 else 1)


@needs_compiler
def test_large_groups_compile():
    for config in warmup.decode_configs((33, 256), ("bfloat16",), (32,)):
        assert jit.compile(config, "sm_80").registers > 0
