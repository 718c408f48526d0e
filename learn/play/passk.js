// Was it there all along? The pass@k of all policies, updated while they sample.

const KS = [1, 2, 4, 8, 16, 32];
const NUM_SAMPLES = KS.at(-1);
let counts = null;      // policy -> for each problem, how many samples were right

async function countSamples() {
  activity = "counting";
  showButtons();
  const names = Object.keys(policies);
  counts = Object.fromEntries(names.map((name) => [name, []]));
  for (const one of examProblems(25, cfg)) {
    for (const name of names) {
      const group = sampleGroup(policies[name], one, NUM_SAMPLES, Math.random, USUAL);
      counts[name].push(group.isRight.reduce((sum, right) => sum + right, 0));
      await breathe();
    }
    showCounted();
  }
  activity = null;
  showButtons();
  say(byId("passk").textContent);
}

function showCounted() {
  const columns = Object.entries(counts).map(([name, some]) => [nameOf(name),
    (k) => mean(some.map((right) => passAtK(NUM_SAMPLES, right, k)))]);
  columns.push(["random guesses", (k) => 1 - (20 / 21) ** k]);
  const head = [plural(counts.base.length, "problem"), ...columns.map(([name]) => name)];
  const rows = KS.map((k) => element("tr", {}, element("th", { scope: "row" }, `k = ${k}`),
    columns.map(([, passAt]) => element("td", {}, percent(passAt(k))))));
  byId("passk").replaceChildren(element("tr", {},
    head.map((name) => element("th", { scope: "col" }, name))), ...rows);
}

byId("count").addEventListener("click", countSamples);
