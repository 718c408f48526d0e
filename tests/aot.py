"""What the kernels are compiled to, for a GPU that need not be here: python tests/aot.py [FILE ...]

Compiles the kernels of each FILE (default: kernels/logprob.py) ahead of time, and reads the machine
code with the disassembler that comes with Triton. Prints a JSON list that says, of every kernel,
what its loop over the logits is made of. test_kernels.py runs it in a process of its own, without
TRITON_INTERPRET.
"""
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

KERNELS = Path(__file__).resolve().parent.parent / "kernels" / "logprob.py"
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# (target, dtype, V, type of `scale`)
VARIANTS = [(90, "bf16", 151936, "fp32"), (90, "fp16", 512, "fp64"), (90, "bf16", 50257, "fp32"),
            (80, "bf16", 151936, "fp32")]


def load(path):
    """The module in a file. Kernels need a file: Triton reads their source."""
    spec = importlib.util.spec_from_file_location(f"logprob_{abs(hash(str(path)))}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_kernel(module, kernel, shape, target, dtype, scale):
    """Compile a kernel as `launch` would, for contiguous logits. -> the compiled code, bytes"""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    constants = dict(shape)
    if "ON_POLICY" in kernel.arg_names:
        constants["ON_POLICY"] = False
    types = {"logits": f"*{dtype}", "grad": f"*{dtype}", "tokens": "*i64", "scale": scale}
    types |= dict.fromkeys(module.SIZES, "i32")
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    aligned = {}
    for i, kind in enumerate(signature.values()):
        if kind.startswith("*"):
            aligned[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": module.THREADS // 32, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    return compiled.asm["cubin"]


def disassemble(code):
    """-> {"REG": registers of a thread, "STACK": bytes}, [(address, instruction), ...]"""
    import triton
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        usage = subprocess.check_output([tool, "--dump-resource-usage", file.name], text=True)
        listing = subprocess.check_output([tool, "--dump-sass", file.name], text=True)
    resources = {key: int(n) for key, n in re.findall(r"\b(REG|STACK):(\d+)", usage)}
    instructions = []
    for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", listing):
        instructions.append((int(address, 16), text))
    return resources, instructions


def loops(instructions):
    """The loops of the code, one for each jump back: the instructions from which the jump is
    reached without passing through its target, wherever they lie. Yields lists of texts"""
    index = {address: i for i, (address, _) in enumerate(instructions)}
    before = {i: [i - 1] for i in range(1, len(instructions))}      # from where each is reached
    jumps = []
    for i, (_, text) in enumerate(instructions):
        target = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text)
        if target:
            begin = index[int(target[1], 16)]
            before.setdefault(begin, []).append(i)
            jumps.append((i, begin))
        if re.match(r"(BRA|EXIT|RET)\b", text):                 # no predicate: never to the next
            before.get(i + 1, []).remove(i)

    for end, begin in jumps:
        if end <= begin:
            continue
        found = {begin}
        todo = [end]
        while todo:
            i = todo.pop()
            if i not in found:
                found.add(i)
                todo += before.get(i, [])
        yield [instructions[i][1] for i in sorted(found)]


def count(pattern, instructions):
    return sum(re.search(pattern, text) is not None for text in instructions)


def num_powers(instructions):
    return count(r"MUFU\.EX2", instructions)


def describe(module, name, target, dtype, V, scale):
    """How many instructions the loop of a kernel takes for a logit, and which ones. -> dict"""
    shape = module.tile(V, BYTES[dtype], V)
    code = compile_kernel(module, getattr(module, name), shape, target, dtype, scale)
    resources, instructions = disassemble(code)
    texts = [text for _, text in instructions]
    loop = max(loops(instructions), key=num_powers)
    per_thread = shape["K"] * shape["VEC"]
    return {"kernel": name, "target": target, "dtype": dtype, "V": V,
            "per_logit": round(len(loop) / per_thread, 2),
            "per_thread": per_thread,
            "powers": num_powers(loop),
            "registers": resources["REG"],
            "stack": resources["STACK"],
            "spills": count(r"\b(LDL|STL)", texts),
            "loads": count(r"\bLDG", loop),
            "loads_128": count(r"\bLDG\S*\.128", loop),
            "stores": count(r"\bSTG", loop),
            "stores_128": count(r"\bSTG\S*\.128", loop),
            "barriers": count(r"\bBAR\.|\bSHFL|\bREDUX", loop),
            "shared": count(r"\b(LDS|STS)", loop),
            "double": count(r"\b(DADD|DMUL|DFMA|DSETP|DMNMX|MUFU\.\w*64H)", texts)}


def main(files):
    variants = VARIANTS[:1] if files else VARIANTS
    described = []
    for file in files or [KERNELS]:
        module = load(file)
        for variant in variants:
            described.append(describe(module, "forward_kernel", *variant))
            described.append(describe(module, "backward_kernel", *variant))
    print(json.dumps(described))


if __name__ == "__main__":
    main(sys.argv[1:])
