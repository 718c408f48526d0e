// The experiments: what each one changes, what to watch, and why it has its effect. No result is
// typed in here: measure.js measures them, with several seeds. This file does not use the page.

// rung: the page of the path about it, without .md; set: the settings that it changes;
// after(of): the text at the end of a run, where of(name) gives one number of each measured run;
// method: a second method with which the experiment is measured, too.
const EXPERIMENTS = [
  { name: "Reward long answers", rung: "08-kl", set: { reward: "length" },
    watch: "It learns to think, as before. Watch the curve after its peak, and what it writes.",
    after: (of) => `A thought is long, so right answers rose with the length, to at ` +
      `most ${of("best")} in three runs. But the longest answer gets the most reward, and ` +
      "nothing rewards sense." },
  { name: "Reward wrong answers", set: { reward: "wrong" },
    watch: "What is the surest way to be wrong? Watch what remains of the thoughts.",
    after: (of) => "Thinking disappears, because it is right too often, and a wrong guess is " +
      `enough. At the end of three runs, ${of("right")} of the answers were right.` },
  { name: "Give the verifier a bug", rung: "09-rewardmodel", set: { reward: "bug" },
    watch: "The verifier now also accepts any answer that begins with 1. Watch how the reward " +
      "and the share of right answers move apart.",
    after: (of) => `In three runs the reward ended at ${of("reward")}, where 1 is the most. If ` +
      "you look only at the reward, you see nothing wrong." },
  { name: "Learning rate × 10", set: { rate: "10" },
    watch: "Watch the first five steps.",
    after: () => "It jumped to thinking, and past it. Once all answers are wrong, all rewards of " +
      "a group are equal, so there is no gradient and no way back." },
  { name: "Praise everybody", rung: "02-baseline", set: { baseline: "-1" }, method: "REINFORCE",
    watch: "Instead of subtracting the mean, we add 1: a right answer counts 2, a wrong one 1, " +
      "and all of them are pushed up. Watch which answers gain most.",
    after: () => "GRPO divides a push by the length of the answer, so short answers gain most " +
      "per token; REINFORCE does not divide. If the group’s mean were subtracted, a point for " +
      "everybody would change nothing." },
  { name: "Temperature 0.2", set: { temperature: "0.2" },
    watch: "The model nearly always draws its most likely tokens, and those make a guess. So " +
      "learning starts late, and suddenly.",
    after: (of) => `In three runs half of the answers were right at step ${of("half")}, and ` +
      `eight of ten at step ${of("eight")}. Then the answers of a group often agree, also on ` +
      "wrong sums. If their rewards are equal, nothing mends these sums." },
  { name: "Temperature 2", set: { temperature: "2" },
    watch: "At this temperature, most thoughts contain a wrong token. Does the model still find " +
      "out that thinking helps?",
    after: (of) => `In three runs, at most ${of("best")} of the samples were right. Thoughts ` +
      "were right about as rarely as guesses, so nothing favoured thinking. The exam uses the " +
      "most likely tokens, but even there the base does better." },
  { name: "Only right answers (RFT)", rung: "00-imitation", set: { baseline: "0" },
    method: "REINFORCE",
    watch: "Right answers are pushed up and wrong ones are left alone, which is rejection " +
      "fine-tuning. Watch how much slower it is.",
    after: () => "A lucky guess is short, so GRPO pushes each of its tokens harder than the " +
      "tokens of a thought. REINFORCE gives each token the same weight." },
  { name: "Only wrong answers", set: { baseline: "1" },
    watch: "Wrong answers are pushed down, and right ones are left alone. Will it learn?",
    after: () => "It can: probabilities add up to 1, so pushing wrong answers down makes room " +
      "for the rest." },
  { name: "Groups of 2", rung: "03-group", set: { group: "2" },
    watch: "Each step has 32 problems with two answers each. In half of the groups or more, " +
      "both answers happen to get the same reward, so these groups give no gradient.",
    after: () => "It takes longer by the clock, because the model has to read four times as many " +
      "problems." },
  { name: "Dr. GRPO", rung: "12-drgrpo", set: { method: "Dr. GRPO" },
    watch: "Dr. GRPO divides neither by the standard deviation nor by the length of an answer.",
    after: () => "Within a group it differs from GRPO in two ways: the advantages have a " +
      "different factor, and a token of a long answer weighs no less than one of a short answer." },
  { name: "MaxRL", set: { method: "MaxRL" },
    watch: "MaxRL divides the advantage by the mean reward, so that rare successes count for " +
      "more.",
    after: () => "But here success is not rare, even at the start." },
  { name: "REINFORCE", rung: "03-group", set: { method: "REINFORCE" },
    watch: "REINFORCE uses the mean of the other answers as the baseline, and gives each token " +
      "weight 1.",
    after: () => "Its gradient is several times as long as GRPO’s, but gradient clipping and " +
      "AdamW divide that out." },
  { name: "Four updates a batch", rung: "05-clip", set: { updates: "4" },
    watch: "Each batch is used four times. From the second time on, the model is no longer the " +
      "one that sampled: ratios differ from 1, and GRPO clips, as PPO does.",
    after: (of) => `In three runs half of the answers were right at step ${of("half")}. ` +
      `${of("clipped")} of the tokens had left the range, so they were not pushed any further.` },
  { name: "Four updates, no clip", rung: "05-clip", set: { updates: "free" },
    watch: "No token loses its gradient, however far its ratio has moved. Watch whether the " +
      "curve gets rough.",
    after: () => "The ratio corrects for what has changed since the batch was sampled, but no " +
      "gradient is removed." },
  { name: "Four updates, no ratio", rung: "05-clip", set: { updates: "4", method: "REINFORCE" },
    watch: "REINFORCE treats each batch as if the current model had sampled it, although three " +
      "of the four updates come after the model has moved on. Watch the curve after its peak.",
    after: (of) => `In three runs up to ${of("best")} of the answers were right. Then the model ` +
      "goes too far, because it is still pushed for answers that it no longer writes." },
  { name: "GSPO, four updates", rung: "13-gspo", set: { updates: "4", method: "GSPO" },
    watch: "GSPO gives a whole answer one ratio, and the range is narrow. With one update per " +
      "batch, it would be the same as GRPO.",
    after: (of) => `In three runs ${of("clipped")} of the tokens were clipped, whole answers at ` +
      "a time." },
  { name: "CISPO, four updates", rung: "20-cispo", set: { updates: "4", method: "CISPO" },
    watch: "CISPO caps the ratio but not the gradient, so every token continues to learn. Watch " +
      "whether the curve stays up at this learning rate.",
    after: (of) => `In three runs up to ${of("best")} of the answers were right, fewer than ` +
      "with the same four updates of GRPO, whose clip removes gradients. With one update per " +
      "batch all ratios are 1, and it would be the same as DAPO." },
];

const FATES = {
  breaks: "These break it",
  bends: "These bend it",
  holds: "And these change less than you might think",
  unknown: "Change something",
};

// The list that an experiment belongs in. It breaks a run if the exams go badly, and bends it if
// they go less well, or if the run takes many more or fewer steps than usual to eight of ten right
// answers.
// runs: with the experiment; usual: without any experiment. -> a key of FATES
function fateOf(runs, usual) {
  if (runs === undefined) return "unknown";
  const exam = mean(runs.map((one) => one.exam));
  const stepsOf = (some) => mean(some.map(({ eight }) => eight ?? LIMIT));
  const change = stepsOf(runs) / stepsOf(usual);
  if (exam < 60) return "breaks";
  return exam < 95 || change > 1.25 || change < 0.8 ? "bends" : "holds";
}

// One number of each of several runs, as text: "97, 98 and 99%".
function eachOf(runs, name) {
  const isShare = ["best", "right", "sums", "clipped"].includes(name);
  const texts = runs.map(({ [name]: value }) => value === null ? "never" :
    isShare ? String(Math.round(100 * value)) : String(Math.round(100 * value) / 100));
  return `${texts.slice(0, -1).join(", ")} and ${texts.at(-1)}${isShare ? "%" : ""}`;
}
