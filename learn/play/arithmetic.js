// The task arithmetic of common.py and the verifier of grpo.py, in JavaScript.

// ---- problems --------------------------------------------------------------------------------

// The crc32 of Python's zlib. text -> 0 .. 2^32 - 1
function crc32(text) {
  let crc = -1;
  for (const byte of utf8.encode(text)) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >>> 1 ^ 0xedb88320 : crc >>> 1;
  }
  return ~crc >>> 0;
}

// Whether a problem is only for the evaluation; the hash of its prompt decides.
function isHeldOut(prompt) {
  return crc32(prompt) % 10 === 0;
}

// A random problem, held out or for training. -> { prompt, answer }
function sampleProblem(random, heldOut, cfg) {
  const integer = (low, high) => low + Math.floor(random() * (high - low + 1));
  for (;;) {
    const count = integer(cfg.minOperands, cfg.maxOperands);
    let value = integer(1, 9);
    let expression = String(value);
    let operands = 1;
    while (operands < count) {
      const sign = "+-*"[integer(0, 2)];
      const operand = integer(1, 9);
      const result = { "+": value + operand, "-": value - operand, "*": value * operand }[sign];
      if (result >= 0 && result <= 20) {
        expression = `(${expression}${sign}${operand})`;
        value = result;
        operands += 1;
      }
    }
    const prompt = expression + "=";
    if (isHeldOut(prompt) === heldOut) return { prompt, answer: String(value) };
  }
}

// Compute a typed expression: whole numbers, + - *, brackets, and = at its end, by the usual rules.
// Inside, ~ is the sign of a negative number. -> string, or null if this is no such expression
function solve(prompt) {
  const signed = (value) => String(value).replace("-", "~");
  const valueOf = (text) => BigInt(text.replace("~", "-"));
  const rules = [                       // apply the first that matches, until none does
    [/(?<![~0-9)])\((~?[0-9]+)\)(?![0-9(])/, (_, a) => a],
    [/(~?[0-9]+)\*(~?[0-9]+)/, (_, a, b) => signed(valueOf(a) * valueOf(b))],
    [/(?<![-+*~0-9)])(~?[0-9]+)([-+])(~?[0-9]+)(?![*0-9(])/, (_, a, sign, b) =>
      signed(sign === "+" ? valueOf(a) + valueOf(b) : valueOf(a) - valueOf(b))],
  ];
  let text = prompt.includes("~") ? "" : prompt;
  for (;;) {
    const rule = rules.find(([pattern]) => pattern.test(text));
    if (rule === undefined) break;
    text = text.replace(...rule);
  }
  return /^~?[0-9]+=$/.test(text) ? text.slice(0, -1).replace("~", "-") : null;
}

// Whether a prompt has the form of the task: one number, then operations, each in its own brackets.
function hasTaskForm(prompt) {
  const opened = /^\(*/.exec(prompt)[0].length;
  const signs = prompt.match(/[-+*][1-9]\)/g) ?? [];
  return opened === signs.length && /^\(+[1-9]([-+*][1-9]\))+=$/.test(prompt);
}

// Convert typed text to the form in which the policies read problems. -> prompt
function normalized(typed) {
  const prompt = typed.replace(/\s/g, "").replace(/[×·]/g, "*").replace(/[−–]/g, "-");
  return prompt.endsWith("=") ? prompt : prompt + "=";
}

// The intermediate values, and the answer, of a prompt that has the form of the task.
function valuesOf(prompt) {
  const signs = prompt.match(/[-+*][1-9]\)/g);
  return signs.map((_, i) => {
    const end = prompt.indexOf(signs[0]);
    const part = prompt.slice(signs.length - i - 1, end + 3 * (i + 1));
    return Number(solve(part + "="));
  });
}

function isTooLong(prompt, { promptWidth }) {
  return utf8.encode(prompt).length > promptWidth;
}

// Find what in a prompt is outside the task of the policies. -> sentences, none if nothing is
function outside(prompt, cfg) {
  const { minOperands: low, maxOperands: high, promptWidth } = cfg;
  if (isTooLong(prompt, cfg)) return [`The models read at most ${promptWidth} characters with =.`];
  const strange = [...new Set(prompt.slice(0, -1).match(/[^-0-9+*()]/gu) ?? [])];
  if (strange.length > 0) return [`No problem that the models read contains ${strange.join(" ")}.`];
  if (solve(prompt) === null) return ["This is not a complete expression."];

  const numbers = prompt.match(/[0-9]+/g);
  const large = numbers.filter((number) => !/^[1-9]$/.test(number));
  const isInForm = hasTaskForm(prompt);
  const values = isInForm ? valuesOf(prompt) : [Number(solve(prompt))];
  const wild = values.filter((value) => value < 0 || value > 20);
  return [
    large.length > 0 && `The models only know the numbers 1 to 9, not ${large.join(" and ")}.`,
    (numbers.length < low || numbers.length > high) && (numbers.length === 1 ?
      "It has one number." : `It has ${numbers.length} numbers.`),
    large.length === 0 && numbers.length > 1 && !isInForm &&
      "The models only know brackets from the left.",
    wild.length > 0 && `The value ${wild[0]} is below 0 or above 20.`,
  ].filter((reason) => reason);
}

// Random numbers in 0 .. 1 from a seed (mulberry32). -> a function like Math.random
function generator(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ seed >>> 15, seed | 1);
    t ^= t + Math.imul(t ^ t >>> 7, t | 61);
    return ((t ^ t >>> 14) >>> 0) / 2 ** 32;
  };
}

// ---- the verifier ----------------------------------------------------------------------------

// The answer in the only <answer> block of a text, in printable ASCII. -> string, or null if there
// is none
function extract(text) {
  if (text.split("<answer>").length !== 2 || text.split("</answer>").length !== 2) return null;
  const block = /<answer>([ -~]{1,200})<\/answer>/.exec(text);
  return block && block[1].trim();
}

// Whether a text holds the right number. -> 1 or 0
function verify(answer, text) {
  const number = extract(text) ?? "";
  if (answer === null || !/^-?[0-9]{1,20}$/.test(number)) return 0;
  return Number(BigInt(number) === BigInt(answer));
}

// The probability that of k samples, drawn from n of which c are right, at least one is right.
function passAtK(n, c, k) {
  let noneIsRight = 1;
  for (let i = 0; i < k; i++) noneIsRight *= Math.max(0, n - c - i) / (n - i);
  return 1 - noneIsRight;
}
