"""Formulas and sentences of docstrings as on a page of a paper: MathML, which browsers typeset by
themselves, and links."""
import html
import re

GREEK = {"pi": "π", "rho": "ρ", "eps": "ε", "beta": "β", "tau": "τ", "gamma": "γ", "lam": "λ",
         "delta": "δ", "theta": "θ", "alpha": "α", "mu": "μ", "sigmoid": "σ", "grad": "∇"}
UPRIGHT = {"log", "exp", "min", "max", "mean", "std", "clip", "sg", "KL", "LV"}
APPLIED = {"log", "grad", "sigmoid"}        # without parentheses, too: log pi(o | q)
SIGNS = {"<=": "≤", ">=": "≥", "..": "…", "||": "∥", "-": "−", "|": "∣"}
THIN_SPACE = '<mspace width=".17em"/>'

TOKEN = re.compile(r"""
    \s+
  | <= | >= | \.\. | \|\|
  | \|[^|\s]+\|                                         # |o_i|
  | [A-Za-z]+\*? (?: _(?: <?[a-z](?:\+1)?\b | [A-Za-z0-9]+ ))?      # rho_t, o_<t, A_t+1, pi*
  | \d*\.?\d+ (?: e-?\d+ )?
  | .""", re.VERBOSE)


# ---- formulas --------------------------------------------------------------------------------

class Formula:
    """A formula in the ASCII of the docstrings, read by recursive descent: a row has terms; a term
    is a factor, or a fraction of two; a factor is an atom with its arguments and its power."""

    def __init__(self, text):
        self.text = text
        self.tokens = TOKEN.findall(text.strip())

    def peek(self):
        """The next token that is no space, or an empty string."""
        return next((token for token in self.tokens if not token.isspace()), "")

    def take(self):
        """Remove the next token that is no space. -> str"""
        while self.tokens and self.tokens[0].isspace():
            self.tokens.pop(0)
        if not self.tokens:
            raise ValueError(f"a formula ends too early: {self.text}")
        return self.tokens.pop(0)

    def row(self, end=""):
        """MathML of what stands before the token `end`, which is taken, too."""
        terms = []
        while self.peek() not in ("", end):
            has_space = self.tokens[0].isspace()
            term = self.term()
            is_product = terms and not (is_sign(terms[-1]) or is_sign(term))
            if is_product and has_space:
                terms.append(THIN_SPACE)
            terms.append(term)
        if end:
            self.take()
        return "".join(terms)

    def term(self):
        inner, whole = self.factor()
        while self.peek() == "/":
            self.take()
            below, _ = self.factor()
            whole = f"<mfrac>{group(inner)}{group(below)}</mfrac>"
            inner = whole
        return whole

    def factor(self):
        """MathML without outer parentheses, which a fraction does not need, and with them."""
        token = self.take()
        inner, whole = self.atom(token)
        has_arguments = self.tokens and self.tokens[0] in "([" and token[0].isalpha()
        if has_arguments:
            bare, arguments = self.atom(self.take())
            whole = f"<msqrt>{bare}</msqrt>" if token == "sqrt" else whole + arguments
            inner = whole
        elif token in APPLIED and self.peek() and not is_sign(self.peek()):
            _, argument = self.factor()
            whole += THIN_SPACE + argument
            inner = whole
        if self.tokens and self.tokens[0] == "^":
            self.take()
            power, _ = self.atom(self.take())
            whole = f"<msup>{group(whole)}{group(power)}</msup>"
            inner = whole
        return inner, whole

    def atom(self, token):
        """As factor, of a token that has been taken."""
        if token in ("(", "["):
            close = {"(": ")", "[": "]"}[token]
            inner = self.row(close)
            stretch = "" if "<mfrac" in inner or "∑" in inner else ' stretchy="false"'
            left, right = (f"<mo{stretch}>{bracket}</mo>" for bracket in (token, close))
            return inner, left + inner + right
        if re.fullmatch(r"\|[^|\s]+\|", token):
            bar = '<mo stretchy="false">|</mo>'
            whole = bar + Formula(token[1:-1]).row() + bar
        elif token[0].isdigit() or re.match(r"\.\d", token):
            whole = number(token)
        elif token[0].isalpha():
            whole = identifier(token)
        else:
            whole = f"<mo>{html.escape(SIGNS.get(token, token))}</mo>"
        return whole, whole


def is_sign(text):
    """Whether MathML is one operator, or a token of ASCII is. -> bool"""
    return re.fullmatch(r"<mo>[^<]*</mo>|[-+=<>,|]|<=|>=|\|\|", text) is not None


def group(mathml):
    """The same as one element. -> str"""
    is_one = re.fullmatch(r"<(m\w+)>[^<]*</\1>", mathml)
    return mathml if is_one else f"<mrow>{mathml}</mrow>"


def number(token):
    """3.5, or 2e-4 with a power of ten. -> MathML"""
    digits, _, power = token.partition("e")
    if not power:
        return f"<mn>{digits}</mn>"
    times = "" if digits == "1" else f"<mn>{digits}</mn><mo>·</mo>"
    return f"{times}<msup><mn>10</mn><mn>{power.replace('-', '−')}</mn></msup>"


def identifier(token):
    """A name with its index: rho_t, sum_i, KL. A word that is no name stays a word. -> MathML"""
    name, _, index = token.partition("_")
    is_optimal = name.endswith("*")
    name = name.rstrip("*")
    if name == "sum":
        below = subscript(index) if index else "<mrow></mrow>"
        return f"<munder><mo>∑</mo>{below}</munder>"
    if name in UPRIGHT and name.islower() and index:
        return f'<mi mathvariant="normal">{token}</mi>'         # a flag: max_kl
    if name in GREEK or len(name) == 1:
        base = f"<mi>{GREEK.get(name, name)}</mi>"
    elif name in UPRIGHT:
        base = f'<mi mathvariant="normal">{name}</mi>'
    elif name == "sqrt":
        return ""                               # whoever reads its arguments draws the root
    else:
        return f"<mtext>&nbsp;{token}&nbsp;</mtext>"
    if is_optimal:
        base = f"<msup>{base}<mo>*</mo></msup>"
    return f"<msub>{base}{subscript(index)}</msub>" if index else base


def subscript(index):
    """t, <t, t+1, old. -> MathML"""
    parts = []
    for part in re.findall(r"[A-Za-z]+|\d+|.", index):
        if part.isdigit():
            parts.append(f"<mn>{part}</mn>")
        elif part.isalpha():
            parts.append(f"<mi>{part}</mi>" if len(part) == 1 else f"<mtext>{part}</mtext>")
        else:
            parts.append(f'<mo lspace="0" rspace="0">{html.escape(part)}</mo>')
    return group("".join(parts))


def math(text):
    """A formula that stands in a line of text. -> MathML"""
    return f"<math>{Formula(text).row()}</math>"


def display(text):
    """A formula that stands alone: fractions and sums in full size. -> MathML"""
    return f'<math displaystyle="true">{Formula(text).row()}</math>'


# ---- sentences -------------------------------------------------------------------------------

SYMBOL = r"""
    \|[A-Za-z](?:_\w)?\|                                    # |A|
  | \bKL\([^()]*\)
  | (?<!\w)(?<!\w-) (?: [A-Za-z] | KL | LV | sum | rho | pi | eps ) _ <?[A-Za-z0-9]+ \b
  | (?<!\w)(?<!\w-)(?<!--) (?: alpha | beta | gamma | delta | eps | theta | lam | mu | pi | rho
        | tau | grad | sigmoid ) (?: \^[a-z] )? \b
  | (?<![\w.'@-]) [A-Za-z]\*? (?! [\w'@] | -[a-z] | \.\w )
"""
INLINE = re.compile(rf"""
    \( (?P<number>\d\d?) \)
  | (?:arXiv:)? \b (?P<arxiv>\d{{4}}\.\d{{5}}) \b
  | (?P<flag>--\w+)
  | (?P<symbol>{SYMBOL})""", re.VERBOSE)


def prose(text, equations=()):
    """Words, in which symbols are typeset, and equations and papers are links. -> HTML"""
    parts = []
    end = 0
    for match in INLINE.finditer(text):
        parts.append(words(text[end:match.start()]))
        parts.append(inline(match, equations))
        end = match.end()
    parts.append(words(text[end:]))
    with_point = r"(<math>(?:(?!</math>).)*</math>)([,.;:)]+)"      # which stay on one line
    return re.sub(with_point, r"<span>\1\2</span>", "".join(parts))


def words(text):
    """What is neither a symbol nor a link, with a minus where no hyphen is meant. -> HTML"""
    return html.escape(re.sub(r"(?<![\w-])-(?=\s|$)", "−", text), quote=False)


def inline(match, equations):
    """What stands in a sentence for a match of INLINE. -> HTML"""
    found = match[0]
    if match["number"]:
        return link(match["number"], found, equations)
    if match["arxiv"]:
        return f'<a class="arxiv" href="https://arxiv.org/abs/{match["arxiv"]}">{found}</a>'
    if match["flag"]:
        return f"<code>{found}</code>"
    if match["symbol"] and not is_word(match):
        return math(found)
    return html.escape(found, quote=False)


def link(number, text, equations):
    """A link to an equation, if there is one with that number. -> HTML"""
    if number not in equations:
        return text
    return f'<a class="ref e{number}" href="#eq{number}">{text}</a>'


def is_word(match):
    """Whether a letter is an article, a and, at the beginning of a sentence, A. -> bool"""
    if match[0] != "A":
        return match[0] in ("a", "I")
    begins = re.search(r"(^|[.:] )$", match.string[:match.start()])
    return begins is not None and re.match(r" [a-z]{3,}", match.string[match.end():]) is not None
