"""What engine.js and arithmetic.js of tools/play compute, without a browser, by node. No tests."""
import base64
import json
import shutil
import subprocess

import pytest
import torch
from conftest import ROOT

NODE = shutil.which("node")
SECONDS = 60
KINDS = {"Float32Array": torch.float32, "Float64Array": torch.float64}

# Numbers in great number cross as base64: a tensor there is a typed array here, and vice versa.
BEGIN = """(() => {
"use strict";
"""
READ = """
const kinds = { Float32Array, Float64Array };
const given = JSON.parse(require("fs").readFileSync(0, "utf8"), (key, value) => {
  const kind = kinds[value?.kind];
  return kind ? new kind(bytesOfBase64(value.base64)) : value;
});
const { inputs, stored } = given;
const cfg = stored?.cfg;
const { base, trained } = stored ? unpack(stored.packed, cfg) : {};
const result = (() => {
"""
WRITE = """
})();
console.log(JSON.stringify(result, (key, value) => {
  if (!ArrayBuffer.isView(value)) return value;
  const part = Buffer.from(value.buffer, value.byteOffset, value.byteLength);
  return { kind: value.constructor.name, base64: part.toString("base64") };
}));
})();
"""


def run(stored, snippet, **inputs):
    """What the body of a JavaScript function returns that knows all of both files, `inputs`, and,
    unless `stored` is None, what a page has stored: cfg, base, trained. AssertionError with what
    node says if it fails, or if it takes too long. Without node the test is skipped."""
    if NODE is None:
        pytest.skip("node is not installed")
    folder = ROOT / "tools/play"
    files = [(folder / name).read_text(encoding="utf-8") for name in ("engine.js", "arithmetic.js")]
    program = "".join([BEGIN, *files, READ, snippet, WRITE])
    text = json.dumps({"stored": stored, "inputs": inputs}, default=from_tensor)
    try:
        done = subprocess.run([NODE, "--eval", program], input=text, capture_output=True,
                              encoding="utf-8", timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no end after {SECONDS} s") from None
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout, object_hook=to_tensor)


def from_tensor(tensor):
    """What stands for a tensor in JSON."""
    [kind] = [name for name, dtype in KINDS.items() if dtype == tensor.dtype]
    content = tensor.contiguous().numpy().tobytes()
    return {"kind": kind, "base64": base64.b64encode(content).decode()}


def to_tensor(value):
    """The tensor that a dict stands for, or the dict. -> tensor (n) or dict"""
    if "base64" not in value:
        return value
    content = bytearray(base64.b64decode(value["base64"]))
    return torch.frombuffer(content, dtype=KINDS[value["kind"]])
