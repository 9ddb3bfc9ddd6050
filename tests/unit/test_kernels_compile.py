"""Every fused kernel, at the shapes of the released models, through Triton's compiler for the A100 and the H200.

The interpreter runs what the compiler may refuse, and knows no shared memory. Compiling needs no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# What one program may have of an SM's shared memory.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}

_COMPILE = """
import json, sys
from importlib import import_module
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from jevany_backend.engine.kernels.delta_rule import PLANS
from jevany_backend.engine.kernels.flash_attention import flash_plans
from jevany_backend.engine.kernels.skinny_product import _TILES

capability = int(sys.argv[1])
HALF, SINGLE, WHOLE, REAL = "*bf16", "*fp32", "i32", "fp32"
inputs = dict(queries=HALF, keys=HALF, decay=SINGLE, step=SINGLE, inverses=HALF, scores=HALF)
sizes = dict(rows=WHOLE, key_heads=WHOLE, heads=WHOLE)
work = [
    ("glu", "_glu", dict(gate=HALF, up=HALF, out=HALF, gate_stride=WHOLE, up_stride=WHOLE, width=WHOLE),
     dict(SILU=False, BLOCK=1024), 4, 3),
    ("sigmoid_gate", "_sigmoid_gate",
     dict(attended=HALF, packed=HALF, out=HALF, attended_stride=WHOLE, head_stride=WHOLE, packed_stride=WHOLE),
     dict(COLUMNS=6144, WIDTH=256, GATES=256, GATE_STRIDE=512, BLOCK=1024), 4, 3),
    ("per_layer_inputs", "_per_layer_inputs",
     dict(projected=HALF, ids="*i32", table=HALF, weight=HALF, out=HALF, eps=REAL, projected_scale=REAL,
          table_scale=REAL), dict(ALL_LAYERS=42, WIDTH=256, LAYERS=8, BLOCK=256), 4, 3),
    ("gated_rms_norm", "_gated_rms_norm", dict(heads=HALF, gate=HALF, weight=HALF, out=HALF, gate_stride=WHOLE,
     eps=REAL), dict(COUNT=48, WIDTH=128, HEADS=8, BLOCK=128), 4, 3),
    ("delta_inputs", "_delta_inputs",
     dict(packed=HALF, filters=HALF, a_log=HALF, time_bias=HALF, queries=HALF, keys=HALF, values=HALF, decay=SINGLE,
          step=SINGLE, rows=WHOLE, stride=WHOLE),
     dict(KEYS=16, KEY_WIDTH=128, VALUES=48, VALUE_WIDTH=128, TAPS=4, EPS=1e-6, TOKENS=16, BLOCK=128, GATES=64), 4, 3),
]
for normed, inner, scaled in ((True, False, False), (True, True, False), (True, True, True), (False, True, True)):
    work.append((
        "add_rms_norm", "_add_rms_norm",
        dict(residual=HALF, delta=SINGLE, weight=SINGLE, delta_weight=SINGLE, scale=HALF, normed=HALF, width=WHOLE,
             eps=REAL, delta_eps=REAL),
        dict(PARTS=8, NORMED=normed, DELTA_NORMED=inner, SCALED=scaled, BLOCK=8192), 16, 3))
# Qwen, Muse, Gemma: all rows, keys and values alone, queries alone at their places.
for queries, keys, width, gates, half, values in (
    (24, 4, 256, 2, 32, False), (32, 2, 128, 1, 64, False), (32, 2, 128, 1, 0, False), (8, 2, 512, 0, 256, True)
):
    for heads, key_heads, placed in ((queries, keys, False), (0, keys, False), (queries, 0, True)):
        work.append((
            "qk_norm_rotary", "_qk_norm_rotary",
            dict(packed=HALF, query_weight=SINGLE, key_weight=SINGLE, cosine=SINGLE, sine=SINGLE, positions="*i32",
                 queries=HALF, keys=HALF, values=HALF, stride=WHOLE, query_eps=REAL, key_eps=REAL),
            dict(QUERIES=heads, KEYS=key_heads, QUERY_STRIDE=2 * width if gates == 2 else width,
                 KEYS_BEGIN=heads * width * (2 if gates else 1), WIDTH=width, HALF=half, POSITIONS=placed,
                 VALUES=values and key_heads > 0, HEADS=4, BLOCK=width), 4, 3))
for heads, group, width in ((24, 6, 256), (32, 16, 128), (8, 4, 512)):
    plans = flash_plans(width)
    # The least, which must fit everywhere, and the largest: what does not fit is left out when it is measured.
    for plan, placed in ((plans[1], True), *(((plans[-1], False),) if capability >= 90 else ())):
        work.append((
            "flash_attention", "_flash_attention",
            dict(query=HALF, key=HALF, value=HALF, positions="*i32", out=HALF, query_stride=WHOLE, key_stride=WHOLE,
                 value_stride=WHOLE, rows=WHOLE, count=WHOLE, window=WHOLE, scale=REAL),
            dict(HEADS=heads, GROUP=group, WIDTH=width, BLOCK=width, POSITIONS=placed, QUERIES=plan.queries,
                 KEYS=plan.keys, PRECISION="ieee"), plan.warps, plan.stages))
for plan in PLANS:
    system = dict(KEY_WIDTH=128, CHUNK=plan.chunk, BASE=plan.base,
                  DOUBLINGS=(plan.chunk // plan.base).bit_length() - 1, PRECISION="tf32")
    if plan.prepared:
        work.append(("delta_rule", "_prepare", inputs | sizes, system, 4, 3))
    work.append(("delta_rule", "_scan", inputs | sizes | dict(values=HALF, out=HALF, scale=REAL),
                 system | dict(VALUE_WIDTH=128, COLUMNS=plan.columns, PREPARED=plan.prepared), plan.warps, 2))

for tile, block, stages, warps in _TILES:
    for rows in (64, 128):
        for out in (HALF, SINGLE):
            types = dict(rows=HALF, weight=HALF, out=out, count=WHOLE, inputs=WHOLE, outputs=WHOLE, blocks=WHOLE)
            constants = dict(ROWS=rows, OUTPUTS=tile, INPUTS=block, PRECISION="ieee")
            work.append(("skinny_product", "_skinny_product", types, constants, warps, stages))

both = [(early, *one) for one in work for early in ((False, True) if capability >= 90 and "EARLY" in
        getattr(import_module("jevany_backend.engine.kernels." + one[0]), one[1]).arg_names else (False,))]
found, unsafe = {}, []
for early, file, name, types, constants, warps, stages in both:
    kernel = getattr(import_module("jevany_backend.engine.kernels." + file), name)
    order = kernel.arg_names
    signature = {argument: types.get(argument, "constexpr") for argument in order}
    unspecialised = {"rows", "count", "window"} if name == "_flash_attention" else set()
    aligned = {(order.index(a),): [["tt.divisibility", 16]] for a, t in types.items()
               if (t == WHOLE or t[0] == "*") and a not in unspecialised}
    constants = constants | ({"EARLY": early} if "EARLY" in order else {})
    source = ASTSource(kernel, signature, {(order.index(a),): value for a, value in constants.items()}, aligned)
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": early}
    compiled = triton.compile(source, target=target, options=options)
    found[f"{name} {constants}"] = compiled.metadata.shared
    ptx = compiled.asm["ptx"]
    accesses = [ptx.find(word) for word in ("ld.global", "st.global", "cp.async.c") if word in ptx]
    if ("griddepcontrol.wait" in ptx) != early or (early and ptx.index("griddepcontrol.wait") > min(accesses)):
        unsafe.append(name)
print(json.dumps({"shared": found, "unsafe": unsafe}))
"""


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_compile_and_fit(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", _COMPILE, str(capability)], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    result_of = json.loads(result.stdout)
    # A kernel that is launched early touches no memory before the one in front of it has ended.
    assert result_of["unsafe"] == []
    found = result_of["shared"]
    assert len(found) > 12
    too_large = {kernel: shared for kernel, shared in found.items() if shared > SHARED_BYTES[capability]}
    assert not too_large
