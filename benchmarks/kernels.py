"""Do the Triton kernels build for every GPU, are they right, and how fast are they beside FlexAttention and SDPA?

    python -m benchmarks.kernels --compile_only --csv builds.csv    # needs no GPU
    python -m benchmarks.kernels                                    # needs one: checks, then times, in under 8 minutes

Building: one row a kernel, target and dtype. spill_bytes: of its registers, those that a thread keeps in memory.
matrix_unit: whether tensor-core instructions are in the machine code ("not needed": kernels without matrix products,
and float32, which is exact and does without on NVIDIA). It fails where a kernel spills, misses them or needs more
shared memory than there is. Timing: milliseconds, median; SDPA and cuDNN compute all pairs, whatever the window.
"""

import argparse
import concurrent.futures
import csv
import importlib
import itertools
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from unittest import mock

import torch

from benchmarks.table import RESULTS, write_rows
from lean_arch.ops import depthwise_conv2d, layer_norm2d, sparse_attention, use
from lean_arch.ops.patterns import causal, dense, global_tokens, local, random_blocks, strided
from lean_arch.ops.targets import TARGETS, Build, Target

ROOMS = "attention", "depthwise", "layer_norm2d", "linear_cross_entropy", "memory_lookup", "norm_act", "sparse_linear"
MODULES = [f"lean_arch.ops.{room}.kernels" for room in ROOMS]
COLUMNS = ("kernel", "target", "dtype", "registers", "spill_bytes", "shared_bytes", "shared_limit", "matrix_unit")
NVIDIA_UNITS, AMD_UNITS = re.compile(r"\b(wgmma\.|tcgen05\.mma|mma\.sync)"), re.compile(r"\bv_mfma_")


def compile_build(build: Build, target: Target):
    """The compiled kernel, with its machine code and what Triton knows of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names, signature, attributes = build.fn.arg_names, {}, {}
    for name in names:
        kind, _, multiple = build.signature.get(name, "constexpr").partition(":")
        signature[name] = "constexpr" if name in build.constexprs else kind
        if multiple and name not in build.constexprs:
            attributes[(names.index(name),)] = [["tt.divisibility", int(multiple)]]
    source = ASTSource(build.fn, signature, build.constexprs, attributes)
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages}
    if build.maxnreg:
        options["maxnreg"] = build.maxnreg
    return triton.compile(source, GPUTarget(target.backend, target.arch, target.warp_size), options)


def resources(kernel, target: Target) -> tuple[int, int, bool]:
    """(registers of a thread, bytes of its stack, whether matrix units are used) of a compiled kernel."""
    if target.backend == "hip":
        code = kernel.asm["amdgcn"]
        registers, stack, spilled = (
            int(re.search(rf"\.{name}:\s+(\d+)", code)[1])
            for name in ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")
        )
        return registers, max(stack, 4 * spilled), bool(AMD_UNITS.search(code))
    import triton

    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.cubin")
        path.write_bytes(kernel.asm["cubin"])
        text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
    return registers, stack, bool(NVIDIA_UNITS.search(kernel.asm["ptx"]))


def build_row(module: str, target_name: str, number: int) -> dict:
    """The row of the `number`-th build that a module has for a target."""
    target = TARGETS[target_name]
    build = next(itertools.islice(importlib.import_module(module).builds(target), number, None))
    kernel = compile_build(build, target)
    registers, stack, matrix_unit = resources(kernel, target)
    exempt = not build.uses_dot or (build.dtype == "fp32" and not matrix_unit)
    values = build.name, target_name, build.dtype, registers, stack, kernel.metadata.shared, target.shared_limit
    return dict(zip(COLUMNS, (*values, "not needed" if exempt else matrix_unit)))


def faults(row: dict) -> list[str]:
    found = [f"spills {row['spill_bytes']} bytes"] * (row["spill_bytes"] > 0)
    found += [f"needs {row['shared_bytes']} bytes of shared memory"] * (row["shared_bytes"] > row["shared_limit"])
    return found + ["uses no matrix unit"] * (row["matrix_unit"] is False)


def compile_all(targets: list[str], jobs: int, path: pathlib.Path) -> int:
    """Writes the rows of all builds; returns how many are at fault."""
    work = [
        (module, name, number)
        for name, module in itertools.product(targets, MODULES)
        for number, _ in enumerate(importlib.import_module(module).builds(TARGETS[name]))
    ]
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        rows = list(pool.map(build_row, *zip(*work)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    bad = [row for row in rows if faults(row)]
    for row in bad:
        print(f"{row['kernel']} {row['dtype']} on {row['target']} {', '.join(faults(row))}", file=sys.stderr)
    print(f"wrote {path}: {len(rows)} builds, {len(bad)} at fault")
    return len(bad)


def relative_error(got, want) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def check(device: torch.device) -> float:
    """Kernels against the reference in float64, forward and backward: the worst error as a share of what is allowed."""
    worst = 0.0
    patterns = (dense(), causal(), local(70), (local(33) | global_tokens(5)) & causal(), strided(3), random_blocks(2))
    shapes = ((2, 4, 2, 300, 431, 64), (1, 2, 2, 517, 517, 128), (1, 3, 1, 190, 190, 80), (1, 1, 1, 260, 260, 256))
    tolerances = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 1.2e-2}
    for pattern, (b, hq, hkv, nq, nk, d), dtype, ragged in itertools.product(
        patterns, shapes, tolerances, (False, True)
    ):
        sizes = ((b, hq, nq, d), (b, hkv, nk, d), (b, hkv, nk, d))
        inputs = [torch.randn(size, device=device, dtype=dtype, requires_grad=True) for size in sizes]
        exact = [t.detach().double().requires_grad_() for t in inputs]
        upstream = torch.randn_like(inputs[0])
        options = {"key_lengths": torch.arange(nk - b, nk, device=device)} if ragged else {}
        if ragged:
            options["segment_ids"] = (torch.arange(nk, device=device) // 150).expand(b, nk)
        results = []
        for backend, (q, k, v) in (("triton", inputs), ("reference", exact)):
            with use(backend):
                out = sparse_attention(q, k, v, pattern, **options)
                results.append((out, *torch.autograd.grad(out, (q, k, v), upstream.to(out.dtype))))
        error = max(map(relative_error, *results)) / tolerances[dtype]
        if not error <= 1:
            raise SystemExit(f"wrong by {error:.1f} times what is allowed: {pattern} {sizes} {dtype} ragged={ragged}")
        worst = max(worst, error)
    return worst


def check_depthwise(device: torch.device) -> float:
    """The same of the depthwise convolution, none of it by cuDNN."""
    from lean_arch.ops.depthwise import kernels

    worst = 0.0
    geometries = (3, 1, 1, 1), (5, 2, 2, 1), (7, 1, 3, 1), (3, 1, 4, 4), (31, 1, 15, 1)
    layouts = torch.contiguous_format, torch.channels_last
    tolerances = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
    for (kernel, *options), dtype, layout in itertools.product(geometries, tolerances, layouts):
        sizes = ((3, 40, 33, 41), (40, 1, kernel, kernel), (40,))
        inputs = [torch.randn(size, device=device, dtype=dtype) for size in sizes]
        inputs = [t.requires_grad_() for t in (inputs[0].to(memory_format=layout), *inputs[1:])]
        exact = [t.detach().double().requires_grad_() for t in inputs]
        results = []
        with mock.patch.object(kernels, "cudnn_is_fast", return_value=False):
            for backend, tensors in (("triton", inputs), ("reference", exact)):
                with use(backend):
                    out = depthwise_conv2d(*tensors, *options)
                    upstream = torch.linspace(-1, 1, out.numel(), device=device).to(dtype).view(out.shape).to(out.dtype)
                    results.append((out, *torch.autograd.grad(out, tensors, upstream)))
        error = max(map(relative_error, *results)) / tolerances[dtype]
        if not error <= 1:
            raise SystemExit(f"wrong by {error:.1f} times what is allowed: {kernel} {options} {dtype} {layout}")
        worst = max(worst, error)
    return worst


def check_layer_norm2d(device: torch.device) -> float:
    """The same of LayerNorm over channels."""
    worst = 0.0
    sizes = (3, 96, 33, 41), (70, 17, 7, 7), (2, 1030, 9, 5), (1, 4096, 6, 7)
    layouts = torch.contiguous_format, torch.channels_last
    tolerances = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
    for size, dtype, layout in itertools.product(sizes, tolerances, layouts):
        inputs = [torch.randn(shape, device=device, dtype=dtype) for shape in (size, size[1:2], size[1:2])]
        inputs = [t.requires_grad_() for t in (inputs[0].to(memory_format=layout), *inputs[1:])]
        upstream, results = torch.randn(size, device=device, dtype=dtype), []
        for backend, tensors in (
            ("triton", inputs),
            ("reference", [t.detach().double().requires_grad_() for t in inputs]),
        ):
            with use(backend):
                out = layer_norm2d(*tensors)
                results.append((out, *torch.autograd.grad(out, tensors, upstream.to(out.dtype))))
        error = max(map(relative_error, *results)) / tolerances[dtype]
        if not error <= 1:
            raise SystemExit(f"wrong by {error:.1f} times what is allowed: layer_norm2d {size} {dtype} {layout}")
        worst = max(worst, error)
    return worst


def check_norm_act(device: torch.device) -> float:
    """The same of BatchNorm with an activation, its means over planes and statistics, in place."""
    from lean_arch.ops.norm_act import kernels, reference

    worst = 0.0
    layouts = torch.contiguous_format, torch.channels_last
    tolerances = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
    for act, batch, dtype, layout, size in itertools.product(
        reference.FUNCTIONS, (True, False), tolerances, layouts, ((5, 70, 33, 41), (300, 17, 7, 7), (2, 24, 224, 224))
    ):
        x, grad = (torch.randn(size, device=device, dtype=dtype).to(memory_format=layout) for _ in range(2))
        pooled = torch.randn(*size[:2], 1, 1, device=device, dtype=dtype)
        running = torch.randn(size[1], device=device), torch.rand(size[1], device=device) + 0.5
        parameters = torch.rand(2, size[1], device=device) + 0.5
        statistics = () if batch else running
        u = reference.batch_norm_act(x.double(), *parameters.double(), 1e-3, "identity", *statistics)
        corner = torch.stack([(u - at).abs() for at in (-3, 0, 3, 6)]).amin(0) < 1e-4
        x += corner * 0.02 * (1 + x.abs())  # at a corner of an activation rounding decides on the slope
        results = []
        for room, wide in ((kernels, torch.Tensor.clone), (reference, torch.Tensor.double)):
            z, g, means, moved = wide(x), wide(grad), wide(pooled), [wide(t) for t in running]
            inputs = z, *map(wide, parameters)
            values, norm = room.forward(*inputs, *moved, batch, 0.1, 1e-3, act)
            results.append((values, *moved, *room.backward(g, means, *inputs, norm, g)))
        error = max(map(relative_error, *results)) / tolerances[dtype]
        if not error <= 1:
            raise SystemExit(f"wrong by {error:.1f} times what is allowed: {act} {size} {dtype} {layout} batch={batch}")
        worst = max(worst, error)
    return worst


def attentions(length: int, window: int | None, device):
    """name -> function of q, k, v; for a window ours and FlexAttention, without one those that compute all pairs."""
    if window is None:

        def whole(kind):
            def run(q, k, v):
                with torch.nn.attention.sdpa_kernel(kind):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v)

            return run

        kinds = torch.nn.attention.SDPBackend
        return {"SDPA flash": whole(kinds.FLASH_ATTENTION), "SDPA cuDNN": whole(kinds.CUDNN_ATTENTION)}
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def near(b, h, i, j):
        return (i - j).abs() <= window

    mask = torch.compile(create_block_mask)(near, None, None, length, length, device=device)
    flex = torch.compile(flex_attention, dynamic=False)
    pattern = local(window)
    return {
        "FlexAttention": lambda q, k, v: flex(q, k, v, block_mask=mask),
        "lean_arch": lambda q, k, v: sparse_attention(q, k, v, pattern),
    }


def milliseconds(attend, inputs, upstream) -> tuple[float, float]:
    """Of the forward and of the backward pass."""
    from triton.testing import do_bench

    out = attend(*inputs)
    forward = do_bench(lambda: attend(*inputs), warmup=10, rep=60, return_mode="median")
    return forward, do_bench(
        lambda: torch.autograd.grad(out, inputs, upstream, retain_graph=True), warmup=10, rep=60, return_mode="median"
    )


def timings(device, heads: int, seconds: float):
    """Rows, until `seconds` have passed: what has not begun by then is left out, and said so."""
    end = time.perf_counter() + seconds
    for size, length, window in itertools.product((64, 128), (8192, 16384, 32768, 65536), (256, 1024, 4096, None)):
        if time.perf_counter() > end:
            print(f"out of time before head size {size}, length {length}, window {window or 'all'}")
            return
        torch.compiler.reset()
        q, k, v, upstream = (
            torch.randn(1, heads, length, size, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(4)
        )
        measured = {
            name: milliseconds(attend, (q, k, v), upstream.detach())
            for name, attend in attentions(length, window, device).items()
        }
        first = next(iter(measured.values()))
        for name, (forward, backward) in measured.items():
            yield {
                "variant": name,
                "heads": heads,
                "head_size": size,
                "length": length,
                "window": window or "all",
                "forward_ms": round(forward, 3),
                "backward_ms": round(backward, 3),
                "forward_speed": round(first[0] / forward, 2),  # the first variant's time over this one's
                "backward_speed": round(first[1] / backward, 2),
            }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile_only", action="store_true")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count(), 16), help="builds at a time")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--csv", type=pathlib.Path, help="default: a name of its own under benchmarks/results/")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.exit(2, "TRITON_INTERPRET=1 puts Triton's interpreter where its compiler is wanted; unset it.\n")
    if args.compile_only:
        import triton

        path = args.csv or RESULTS / f"builds_triton-{triton.__version__}.csv"
        sys.exit(min(compile_all(args.targets, args.jobs, path), 1))
    if not torch.cuda.is_available():
        parser.exit(2, "Checking and timing the kernels needs a GPU; without one, --compile_only builds them.\n")
    start, device, rows = time.perf_counter(), torch.device("cuda"), []
    worst = max(f(device) for f in (check, check_depthwise, check_layer_norm2d, check_norm_act))
    print(f"all right: worst error {worst:.2f} of what is allowed", flush=True)
    for row in timings(device, args.heads, 7 * 60 - (time.perf_counter() - start)):
        print(row, flush=True)
        rows.append(row)
    write_rows("kernels", rows, args.csv)


if __name__ == "__main__":
    main()
