"""Run the JavaScript files of learn/play that do not use the page, in node. Helpers; no tests."""
import base64
import json
import shutil
import subprocess

import pytest
import torch

from learn.play import build

NODE = shutil.which("node")
SECONDS = 120

BEGIN = """(() => {
"use strict";
"""
READ = """
const { inputs, stored } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const cfg = stored?.cfg;
const { base, trained } = stored ? unpack(stored.packed, cfg) : {};
const result = (() => {
"""
WRITE = """
})();
console.log(JSON.stringify(result, (key, value) => value instanceof Float32Array ?
  { floats: Buffer.from(value.buffer, value.byteOffset, value.byteLength).toString("base64") } :
  value));
})();
"""


def run(stored, snippet, **inputs):
    """Run the body of a JavaScript function. It can use everything that these files define,
    `inputs`, and, unless `stored` is None, the cfg, base and trained policy that a page stores.
    Tensors become arrays in JavaScript; a Float32Array in the result becomes a tensor. Raises
    AssertionError if node fails or takes too long. Skips the test without node. -> result"""
    if NODE is None:
        pytest.skip("node is not installed")
    files = [(build.FOLDER / name).read_text(encoding="utf-8") for name in build.ENGINE]
    program = "".join([BEGIN, *files, READ, snippet, WRITE])
    text = json.dumps({"stored": stored, "inputs": inputs}, default=torch.Tensor.tolist)
    try:
        done = subprocess.run([NODE, "--eval", program], input=text, capture_output=True,
                              encoding="utf-8", timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no end after {SECONDS} s") from None
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout, object_hook=to_tensor)


def to_tensor(value):
    """Decode a dict that represents a Float32Array. -> tensor (n,), or any other dict unchanged"""
    if "floats" not in value:
        return value
    return torch.frombuffer(bytearray(base64.b64decode(value["floats"])), dtype=torch.float32)
