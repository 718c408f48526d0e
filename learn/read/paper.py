"""Convert formulas from the ASCII of the docstrings to MathML, which browsers typeset."""
import html
import re

GREEK = {"pi": "π", "rho": "ρ", "eps": "ε", "beta": "β", "tau": "τ", "gamma": "γ", "lam": "λ",
         "delta": "δ", "theta": "θ", "alpha": "α", "mu": "μ", "sigmoid": "σ", "grad": "∇"}
UPRIGHT = ("log", "exp", "min", "max", "mean", "std", "clip", "sg", "KL", "LV")
APPLIED = ("log", "grad", "sigmoid")        # need no parentheses: log pi(o | q)
SIGNS = {"<=": "≤", ">=": "≥", "..": "…", "||": "∥", "-": "−", "|": "∣"}
THIN_SPACE = '<mspace width=".17em"/>'
OPERATOR = re.compile("<mo>[^<]*</mo>").fullmatch        # whether MathML is one
TOKEN = re.compile(r"""
    <= | >= | \.\. | \|\| | --\w+
  | \|[^|\s]+\|                                         # |o_i|
  | [A-Za-z]+\*? (?: _(?: <?[a-z](?:\+1)?\b | [A-Za-z0-9]+ ))? [([]?    # rho_t, o_<t, pi*, exp(
  | \d*\.?\d+ (?: e-?\d+ )?
  | \S""", re.VERBOSE)


class Formula:
    """A formula, parsed by recursive descent. A row consists of terms, a term is a factor or a
    fraction of two factors, and a factor is a symbol or a parenthesis with its power."""

    def __init__(self, text):
        self.tokens = [*TOKEN.findall(text), ""]

    def row(self, end=""):
        """Parse everything up to and including the token `end`. -> MathML"""
        row = ""
        last = "<mo></mo>"
        while self.tokens[0] != end:
            term = self.term()
            row += term if OPERATOR(last) or OPERATOR(term) else THIN_SPACE + term
            last = term
        self.tokens.pop(0)
        return row

    def term(self):
        bare, whole = self.factor()
        while self.tokens[0] == "/":
            self.tokens.pop(0)
            below, _ = self.factor()
            bare = whole = f"<mfrac>{group(bare)}{group(below)}</mfrac>"
        return whole

    def factor(self):
        """Parse a factor. -> MathML without outer parentheses, for fractions, and with them"""
        token = self.tokens.pop(0)
        name = token.rstrip("([")
        whole = bare = symbol(name)
        if name != token:
            inner = self.row({"(": ")", "[": "]"}[token[-1]])
            bare, whole = self.parentheses(name, token[-1], inner)
        elif token in APPLIED and self.tokens[0][:1].isalnum():
            whole = bare = whole + THIN_SPACE + self.factor()[1]
        if self.tokens[0] == "^":
            self.tokens.pop(0)
            power, _ = self.factor()
            whole = bare = f"<msup>{group(whole)}{group(power)}</msup>"
        return bare, whole

    def parentheses(self, name, bracket, inner):
        """Parentheses, after the name of a function if it is not empty. -> as in factor"""
        stretch = "" if "<mfrac" in inner or "∑" in inner else ' stretchy="false"'
        left, right = (f"<mo{stretch}>{sign}</mo>" for sign in {"(": "()", "[": "[]"}[bracket])
        whole = symbol(name) + left + inner + right
        return (whole if name else inner), whole


def group(mathml):
    """Wrap MathML, unless it is a single element. -> MathML"""
    is_one = re.fullmatch(r"<(m\w+)>[^<]*</\1>", mathml)
    return mathml if is_one else f"<mrow>{mathml}</mrow>"


def symbol(token):
    """Convert a number, a name with its index, or a sign. -> MathML"""
    if re.fullmatch(r"\|[^|]+\|", token):
        bar = '<mo stretchy="false">|</mo>'
        return bar + Formula(token[1:-1]).row() + bar
    if token.startswith("--"):
        return f"<mtext>{token}</mtext>"                # a flag
    if token[:1].isdigit() or re.match(r"\.\d", token):
        digits, _, power = token.replace("-", "−").partition("e")
        times = "" if digits == "1" else f"<mn>{digits}</mn><mo>·</mo>"
        ten = f"{times}<msup><mn>10</mn><mn>{power}</mn></msup>"
        return ten if power else f"<mn>{digits}</mn>"
    if not token[:1].isalpha():
        return f"<mo>{html.escape(SIGNS.get(token, token))}</mo>" if token else ""
    name, _, index = token.partition("_")
    if name == "sum":
        return f"<munder><mo>∑</mo>{subscript(index)}</munder>"
    bare = name.rstrip("*")
    base = f"<mtext>&nbsp;{bare}&nbsp;</mtext>"         # any other word stays text
    if bare in GREEK or len(bare) == 1:
        base = f"<mi>{GREEK.get(bare, bare)}</mi>"
    elif bare in UPRIGHT:
        base = f'<mi mathvariant="normal">{bare}</mi>'
    base = base if bare == name else f"<msup>{base}<mo>*</mo></msup>"
    return f"<msub>{base}{subscript(index)}</msub>" if index else base


def subscript(index):
    """Convert an index such as t, <t, t+1 or old. -> MathML"""
    parts = ""
    for part in re.findall(r"[A-Za-z]+|\d+|.", index):
        if part.isdigit():
            parts += f"<mn>{part}</mn>"
        elif not part.isalnum():
            parts += f'<mo lspace="0" rspace="0">{html.escape(part)}</mo>'
        elif len(part) == 1:
            parts += f"<mi>{part}</mi>"
        else:
            parts += f"<mtext>{part}</mtext>"
    return group(parts)


def math(text, kind=""):
    """Convert a formula. kind: attributes of the element. -> MathML"""
    row = Formula(text).row().replace(f"&nbsp;</mtext>{THIN_SPACE}<mtext>&nbsp;", "&nbsp;")
    return f"<math{kind}>{row.replace('&nbsp;</mtext><mo>,', '</mtext><mo>,')}</math>"
