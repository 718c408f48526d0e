// Levers: what each changes, what to watch, and why it does what it does. How it ends is nowhere
// typed in: measure.js finds it, with several seeds. Nothing here knows of a page.

// rung: the chapter of the path about it; set: what it changes; after(of): what to say at the end,
// of(name) names a number of the runs of the lever; method: of which it is measured, too.
const LEVERS = [
  { name: "Reward long answers", rung: "kl", set: { reward: "length" },
    watch: "It learns to think, as before. Watch the curve after its top, and what it writes.",
    after: (of) => `A thought is long, so right answers came along, in three runs up to ` +
      `${of("best")}. But the longest answer pays best, and nothing asks for sense.` },
  { name: "Reward wrong answers", set: { reward: "wrong" },
    watch: "What is the surest way to be wrong? Watch what is left of the answer.",
    after: () => "Thinking goes first, since it is right too often. Then the number goes." },
  { name: "Give the verifier a bug", rung: "rewardmodel", set: { reward: "bug" },
    watch: "It also accepts any answer that begins with 1. Watch reward and right answers part.",
    after: (of) => `In three runs the reward ended at ${of("reward")}; 1 is the most. Who sees ` +
      "it alone sees no harm." },
  { name: "Learning rate × 10", set: { rate: "10" },
    watch: "Watch the first five steps.",
    after: () => "It jumped to thinking, and past it. Once all answers are wrong no group has " +
      "signal, and there is no way back." },
  { name: "Praise everybody", rung: "baseline", set: { baseline: "-1" }, method: "REINFORCE",
    watch: "No mean is subtracted, 1 is added: right counts 2, wrong counts 1, and all of it is " +
      "pushed up. Watch who profits.",
    after: () => "GRPO divides a push by the length of the answer, so short answers gain most " +
      "per token; REINFORCE does not divide. Less the group’s mean, a point for everybody " +
      "changes nothing." },
  { name: "Temperature 0.2", set: { temperature: "0.2" },
    watch: "Nearly always the likeliest token is drawn, and likeliest is to guess. It starts " +
      "late, and suddenly.",
    after: (of) => `In three runs half were right at step ${of("half")}, nine of ten at ` +
      `${of("nine")}. Then groups soon agree, also on what they get wrong.` },
  { name: "Temperature 2", set: { temperature: "2" },
    watch: "Hopeless to the end? Wait for the exam, which takes the likeliest tokens.",
    after: (of) => `Of the samples of three runs never more than ${of("best")} were right. What ` +
      "was learned is there, under the noise." },
  { name: "Only right answers (RFT)", rung: "reinforce", set: { baseline: "0" },
    method: "REINFORCE",
    watch: "Wrong answers are left alone: rejection fine-tuning. Watch how much slower it is.",
    after: () => "A lucky guess is short, and GRPO pushes each of its tokens harder than those " +
      "of a thought. REINFORCE gives each token the same weight." },
  { name: "Only wrong answers", set: { baseline: "1" },
    watch: "Nothing is ever praised: what is wrong is pushed down, that is all. Will it learn?",
    after: () => "It can: chances add up to 1, so what is pushed down makes room for the rest." },
  { name: "Groups of 2", rung: "group", set: { group: "2" },
    watch: "32 problems, two answers each: half of the groups agree by chance, and have no frame.",
    after: () => "It takes longer by the clock: four times as many problems have to be read." },
  { name: "Dr. GRPO", rung: "drgrpo", set: { method: "Dr. GRPO" },
    watch: "No division by the standard deviation, nor by the length of an answer.",
    after: () => "Within a group it differs from GRPO by a factor, and in that a token of a long " +
      "answer weighs no less." },
  { name: "MaxRL", set: { method: "MaxRL" },
    watch: "Divided by the mean: rare success counts for more.",
    after: () => "But success is not rare here, from the start." },
  { name: "REINFORCE", rung: "group", set: { method: "REINFORCE" },
    watch: "The baseline is the mean of the others; each token has weight 1.",
    after: () => "Its gradient is several times as long, which clipping and AdamW divide out." },
  { name: "Four updates a batch", rung: "clip", set: { updates: "4" },
    watch: "Each batch is used four times. From the second time on the model is not the one " +
      "that sampled: ratios differ from 1, and GRPO clips, as PPO does.",
    after: (of) => `In three runs half were right at step ${of("half")}; ${of("clipped")} of ` +
      "the tokens had left the range, and were not pushed any further." },
  { name: "Four updates, no clip", rung: "clip", set: { updates: "free" },
    watch: "No token loses its gradient, however far its ratio has moved. Watch whether the " +
      "curve gets rough.",
    after: () => "The ratio corrects for what has changed, but no gradient is taken away." },
  { name: "Four updates, no ratio", rung: "ratio", set: { updates: "4", method: "REINFORCE" },
    watch: "REINFORCE takes each batch for its own, though three updates of four come after it " +
      "has moved on. Watch the curve after its top.",
    after: (of) => `In three runs up to ${of("best")} were right. Pushed for what it no longer ` +
      "writes, it goes too far." },
  { name: "GSPO, four updates", rung: "gspo", set: { updates: "4", method: "GSPO" },
    watch: "One ratio for all of an answer, and a narrow range. With one update it would be GRPO.",
    after: (of) => `${of("clipped")} of the tokens of three runs were clipped, whole answers at ` +
      "a time." },
  { name: "CISPO, four updates", rung: "cispo", set: { updates: "4", method: "CISPO" },
    watch: "The ratio is cut, the gradient is not: every token goes on learning.",
    after: () => "With one update all ratios are 1, and it would be DAPO." },
];

const FATES = {
  breaks: "These break it",
  bends: "These bend it",
  holds: "And these change less than one might think",
  unknown: "Change one thing",
};

// In which list a lever stands, by its runs and those without any lever: whether it ends at what is
// not worth having, or is a quarter slower, or faster, than usual to nine of ten.
function fateOf(runs, usual) {
  if (runs === undefined) return "unknown";
  const exam = mean(runs.map((one) => one.exam));
  const stepsOf = (some) => mean(some.map(({ nine }) => nine ?? LIMIT));
  const change = stepsOf(runs) / stepsOf(usual);
  if (exam < 60) return "breaks";
  return exam < 95 || change > 1.25 || change < 0.8 ? "bends" : "holds";
}

// One number of each of several runs, in words: "97, 98 and 99%".
function eachOf(runs, name) {
  const isShare = ["best", "clipped"].includes(name);
  const texts = runs.map(({ [name]: value }) => value === null ? "never" :
    isShare ? String(Math.round(100 * value)) : String(Math.round(100 * value) / 100));
  return `${texts.slice(0, -1).join(", ")} and ${texts.at(-1)}${isShare ? "%" : ""}`;
}
