// Measure in Node.js, for the page, what the experiments do with each seed, and what a single push
// does. Progress goes to stderr, the results to stdout.

const { base, trained } = unpack(stored.packed, stored.cfg);
const SEEDS = ["1", "2", "3"];
const USUAL_SEEDS = ["1", "2", "3", "4", "5"];
const HAND_GROUPS = 300;

// Train with these settings to the end. -> the run
function runOf(settings) {
  const run = newRun(base, settings);
  while (reasonToStop(run) === null) finish(trainStep(run));
  return run;
}

// The record of a run. seconds: of the processor, which other programs disturb less than the clock
function recordOf(settings) {
  const before = process.cpuUsage();
  const run = runOf(settings);
  const { user, system } = process.cpuUsage(before);
  const right = run.log.map((_, i) => smoothed(run.log, "right", i + 1));
  const first = (share) => right.findIndex((one) => one >= share) + 1 || null;
  const record = {
    exam: finish(examine(run.policy)), steps: run.log.length, half: first(0.5), eight: first(0.8),
    best: Math.max(...right), right: right.at(-1), reward: smoothed(run.log, "reward"),
    sums: smoothed(run.log, "sumsRight") / smoothed(run.log, "sums"),       // NaN becomes null
    clipped: mean(run.log.map(({ clipped }) => clipped)),
    seconds: Math.round((user + system) / 1e5) / 10,
  };
  console.error(labelOf(settings), settings.seed, JSON.stringify(record));
  return record;
}

function recordsOf(set, seeds = SEEDS) {
  return seeds.map((seed) => recordOf({ ...USUAL, ...set, seed }));
}

// Push groups of answers to the problem of the first screen. -> the number of groups; of the tokens
// whose probability changed by half a percentage point or more, the share that moved as they were
// pushed; of the wrong answers, the share that became more likely
function handRecord() {
  const problem = firstProblem(base, trained);
  let [groups, moved, asPushed, wrong, risen] = [0, 0, 0, 0, 0];
  for (let seed = 1; seed <= HAND_GROUPS; seed++) {
    const policy = copyOf(base);
    const group = sampleGroup(policy, problem, 8, generator(seed), USUAL);
    if (!teaches(group)) continue;
    groups += 1;
    const push = pushGroup(policy, newOptimizer(policy), group);
    for (const token of push.tokens.values()) {
      const change = token.after - token.before;
      if (Math.abs(change) < 0.005) continue;
      moved += 1;
      asPushed += Number(change > 0 === token.net > 0);
    }
    group.isRight.forEach((isRight, i) => {
      wrong += 1 - isRight;
      risen += Number(!isRight && push.times[i] > 1);
    });
  }
  return { groups, asPushed: asPushed / moved, risen: risen / wrong };
}

// the right answers of each step of the usual run, for readers who press an experiment first
const curve = runOf(USUAL).log.map(({ right }) => Math.round(BATCH * right));
const experiments = Object.fromEntries(EXPERIMENTS.map(({ name, set }) => [name, recordsOf(set)]));
const beside = Object.fromEntries(EXPERIMENTS.filter(({ method }) => method).map(
  ({ name, set, method }) => [name, recordsOf({ ...set, method })]));
console.log(JSON.stringify({
  base: finish(examine(base)), forced: finish(examine(base, thought(stored.cfg))),
  usual: recordsOf({}, USUAL_SEEDS), curve, experiments, beside, hand: handRecord() }));
