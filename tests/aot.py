"""What the kernels become when compiled for a GPU that need not be here: python tests/aot.py [FILE ...]

Compiles the kernels of each FILE (default: kernels/logprob.py) ahead of time, reads the machine code with the
disassembler that comes with Triton, and prints a JSON list: of every kernel, what its loop over the logits is
made of. test_kernels.py runs it in a process of its own, without TRITON_INTERPRET.
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
VARIANTS = ((90, "bf16", 151936, "fp32"), (90, "fp32", 151936, "fp32"), (90, "fp16", 512, "fp64"),
            (90, "bf16", 50257, "fp32"), (80, "bf16", 151936, "fp32"))


def load(path):
    """The module that a file holds. Kernels need a file: Triton reads their source."""
    spec = importlib.util.spec_from_file_location(f"logprob_{abs(hash(str(path)))}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def machine_code(module, name, target, dtype, V, scale):
    """Compile one kernel as `launch` would, for contiguous logits. -> its tile, resources and instructions"""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    kernel = getattr(module, name)
    shape = module.tile(V, BYTES[dtype], V)
    constants = dict(shape, **{"ON_POLICY": False} if "ON_POLICY" in kernel.arg_names else {})
    types = {"logits": f"*{dtype}", "grad": f"*{dtype}", "tokens": "*i64", "scale": scale}
    types |= dict.fromkeys(module.SIZES, "i32") | dict.fromkeys(constants, "constexpr")
    signature = {arg: types.get(arg, "*fp32") for arg in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(signature.values()) if arg[0] == "*"}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32),
                              options={"num_warps": module.THREADS // 32, "enable_fp_fusion": True})
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        resources, code = (subprocess.check_output([tool, option, file.name], text=True)
                           for option in ("--dump-resource-usage", "--dump-sass"))
    instructions = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", code)]
    return shape, {key: int(n) for key, n in re.findall(r"\b(REG|STACK):(\d+)", resources)}, instructions


def loops(instructions):
    """For each jump back: the instructions from which it is reached without passing through its target, which
    need not lie between the two. -> lists of their texts"""
    index = {at: i for i, (at, _) in enumerate(instructions)}
    before = {i: [i - 1] for i in range(1, len(instructions))}      # from where each is reached
    jumps = []
    for i, (_, text) in enumerate(instructions):
        to = re.findall(r"\bBRA\b.*\b0x([0-9a-f]+)", text)
        if to:
            jumps.append((i, index[int(to[0], 16)]))
            before.setdefault(jumps[-1][1], []).append(i)
        if re.match(r"(BRA|EXIT|RET)\b", text):                         # no predicate: never to the next
            before.get(i + 1, []).remove(i)
    for end, begin in jumps:
        found, todo = {begin}, [end] if end > begin else []
        while todo:
            if (i := todo.pop()) not in found:
                found.add(i)
                todo += before.get(i, [])
        if len(found) > 1:
            yield [instructions[i][1] for i in sorted(found)]


def describe(module, name, *variant):
    """Of one kernel: how many instructions its loop takes for a logit, and which of them cost."""
    shape, resources, instructions = machine_code(module, name, *variant)
    power = lambda loop: sum("MUFU.EX2" in text for text in loop)
    loop = max(loops(instructions), key=power)
    per_thread = shape["K"] * shape["VEC"]
    count = lambda pattern, code: sum(bool(re.search(pattern, text)) for text in code)
    code = [text for _, text in instructions]
    return {"kernel": name, "target": variant[0], "dtype": variant[1], "V": variant[2],
            "per_logit": round(len(loop) / per_thread, 2), "per_thread": per_thread, "powers": power(loop),
            "registers": resources["REG"], "stack": resources["STACK"], "spills": count(r"\b(LDL|STL)", code),
            "loads": count(r"\bLDG", loop), "loads_128": count(r"\bLDG\S*\.128", loop),
            "stores": count(r"\bSTG", loop), "stores_128": count(r"\bSTG\S*\.128", loop),
            "barriers": count(r"\bBAR\.|\bSHFL|\bREDUX", loop), "shared": count(r"\b(LDS|STS)", loop),
            "double": count(r"\b(DADD|DMUL|DFMA|DSETP|DMNMX|MUFU\.\w*64H)", code)}


def main(files):
    out = []
    for file in files or [KERNELS]:
        module = load(file)
        for variant in VARIANTS if not files else VARIANTS[:1]:
            out += [describe(module, name, *variant) for name in ("forward_kernel", "backward_kernel")]
    print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1:])
