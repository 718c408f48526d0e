// The task arithmetic of common.py and the verifier of grpo.py, for a browser.

// ---- problems --------------------------------------------------------------------------------

// crc32, as Python's zlib has it. text -> 0 .. 2^32 - 1
function crc32(text) {
  let crc = -1;
  for (const byte of utf8.encode(text)) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >>> 1 ^ 0xedb88320 : crc >>> 1;
  }
  return ~crc >>> 0;
}

// Whether a problem is for the evaluation alone, which the hash of its prompt decides.
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

// The right answer to what somebody typed: a sum of whole numbers with + - * and brackets, the
// usual rules, and = at its end. -> string, or null if it is none
function solve(prompt) {
  const parts = prompt.match(/[0-9]+|[^0-9]/g) ?? [];
  const take = (...wanted) => wanted.includes(parts[0]) ? parts.shift() : null;

  function atom() {
    if (take("(")) {
      const value = sum();
      if (!take(")")) throw new SyntaxError("no closing bracket");
      return value;
    }
    if (!/^[0-9]+$/.test(parts[0] ?? "")) throw new SyntaxError("no number");
    return BigInt(parts.shift());
  }

  function product() {
    let value = atom();
    while (take("*")) value *= atom();
    return value;
  }

  function sum() {
    let value = product();
    for (let sign = take("+", "-"); sign; sign = take("+", "-")) {
      const next = product();
      value = sign === "+" ? value + next : value - next;
    }
    return value;
  }

  try {
    const value = sum();
    return parts.join("") === "=" ? String(value) : null;
  } catch (error) {
    if (error instanceof SyntaxError) return null;
    throw error;
  }
}

// Whether a prompt looks like those of the task: one number, and each sign in brackets of its own.
function hasTaskForm(prompt) {
  const opened = /^\(*/.exec(prompt)[0].length;
  const signs = prompt.match(/[-+*][1-9]\)/g) ?? [];
  return opened === signs.length && /^\(+[1-9]([-+*][1-9]\))+=$/.test(prompt);
}

// Numbers in 0 .. 1 that are a function of the seed (mulberry32). -> a function like Math.random
function generator(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ seed >>> 15, seed | 1);
    t ^= t + Math.imul(t ^ t >>> 7, t | 61);
    return ((t ^ t >>> 14) >>> 0) / 2 ** 32;
  };
}

// ---- the verifier ----------------------------------------------------------------------------

// The answer in the one <answer> block of a text, printable ASCII. -> string, or null without
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

// ---- scores ----------------------------------------------------------------------------------

// The chance that of k samples, drawn from n of which c are right, at least one is right.
function passAtK(n, c, k) {
  let noneIsRight = 1;
  for (let i = 0; i < k; i++) noneIsRight *= Math.max(0, n - c - i) / (n - i);
  return 1 - noneIsRight;
}

// The most frequent answer, of equally frequent ones the first; null if there is none.
function majority(answers) {
  const votes = new Map();
  for (const answer of answers) {
    if (answer !== null) votes.set(answer, (votes.get(answer) ?? 0) + 1);
  }
  let best = null;
  for (const [answer, count] of votes) if (best === null || count > votes.get(best)) best = answer;
  return best;
}

// How often the majority of k answers is `right`, over the blocks of k of them; numbers are written
// as `right` is, without zeros in front. k is at most their number.
function majAtK(right, answers, k) {
  const wins = [];
  for (let start = 0; start + k <= answers.length; start += k) {
    wins.push(Number(majority(answers.slice(start, start + k)) === right));
  }
  return mean(wins);
}
