// Was it there all along? pass@k and maj@k of all policies, drawn as they are sampled.

const NUM_SAMPLES = 32;
const KS = [1, 2, 4, 8, 16, 32];
let counts = {};        // of each policy: of each problem, pass@k and maj@k at each of KS
let isCounting = false;

// The number that an answer stands for, 7 for 07; null where there is none.
function vote(text) {
  const answer = extract(text);
  return /^-?[0-9]{1,20}$/.test(answer ?? "") ? String(BigInt(answer)) : answer;
}

function countOne(policy, { prompt, answer }) {
  const tree = new Tree(policy);
  const uniforms = uniformNumbers(NUM_SAMPLES * cfg.T, Math.random);
  const completions = finish(rollout(tree, Array(NUM_SAMPLES).fill(prompt), uniforms));
  const texts = completions.map((completion) => completionText(completion, cfg));
  const right = texts.filter((text) => verify(answer, text)).length;
  const votes = texts.map(vote);
  return {
    pass: KS.map((k) => passAtK(NUM_SAMPLES, right, k)),
    maj: KS.map((k) => majAtK(answer, votes, k)),
  };
}

async function countMore() {
  isCounting = true;
  byId("count").textContent = "Stop";
  byId("count-anew").disabled = true;
  const names = Object.keys(policies);
  if (names.some((name) => counts[name] === undefined)) counts = {};    // all on the same problems
  for (let i = 0; i < 25 && isCounting; i++) {
    const one = sampleProblem(Math.random, true, cfg);
    for (const name of names) {
      (counts[name] ??= []).push(countOne(policies[name], one));
      await breathe();
    }
    showCounts();
  }
  isCounting = false;
  byId("count").textContent = "Sample 25 more";
  byId("count").disabled = false;
  byId("count-anew").disabled = false;
}

function showCounts() {
  const names = Object.keys(counts);
  const series = names.flatMap((name) => ["pass", "maj"].map((kind) => ({
    name: `${name} ${kind}`, kind: kind === "maj" ? `${name} dashed` : name,
    points: KS.map((k, i) => [k, mean(counts[name].map((one) => one[kind][i]))]) })));
  chart(byId("passk-chart"), "pass@k and maj@k by k", series, { x: KS, y: [0, 0.5, 1] },
        (k) => Math.log2(k) / 5);
  if (names.length > 0) {
    byId("count-status").textContent = `${counts[names[0]].length} held-out problems, 32 answers ` +
      "to each, at temperature 1. Lines: pass@k. Dashes: maj@k. Across: k.";
  }
}

// The reader's policy has changed: what was counted of it is of another one.
function forgetCounts() {
  delete counts.yours;
  showCounts();
}

function clearCounts() {
  counts = {};
  byId("count-anew").disabled = true;
  byId("count").textContent = "Sample 25 problems";
  showCounts();
}

byId("count").addEventListener("click", () => {
  if (isCounting) {
    isCounting = false;                                 // after the problem that is under way
    byId("count").disabled = true;
  } else {
    countMore();
  }
});
byId("count-anew").addEventListener("click", clearCounts);

// ---- the page begins -------------------------------------------------------------------------

pose(problem);
showIntroduction();
showCurves();
showCounts();
addEventListener("resize", () => {
  showCurves();
  showCounts();
});
