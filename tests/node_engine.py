"""What the files of tools/play compute that know of no page, by node. No tests."""
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
    """What the body of a JavaScript function returns that knows all of these files, `inputs`, and,
    unless `stored` is None, what a page has stored: cfg, base, trained. Tensors are arrays there, a
    Float32Array is a tensor here. AssertionError with what node says if it fails, or if it takes
    too long. Without node the test is skipped."""
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
    """The tensor that a dict stands for, or the dict. -> tensor (n) or dict"""
    if "floats" not in value:
        return value
    return torch.frombuffer(bytearray(base64.b64decode(value["floats"])), dtype=torch.float32)
