// One training step on one group, with one click for each stage: sample, verify, compare, push.

const HAND_G = 8;
const STAGES = ["sample", "verify", "advantage", "push"];

// The first two groups are chosen: in the first, the push does what one expects, and the second is
// an exception. All others are drawn at random.
const CHOSEN = [
  { isFit: ({ isRight }, { times }) => isRight.some((right) => right) &&
      times.every((factor, i) => isRight[i] ? factor > 1.02 : factor < 0.98),
    why: "in which the push makes all right answers more likely, and all wrong ones less likely" },
  { isFit: ({ isRight }, { times, tokens }) =>
      times.some((factor, i) => !isRight[i] && factor > 1.02) &&
      [...tokens.values()].some(({ up, down }) => up > 0 && down < 0),
    why: "in which right and wrong answers share a token, and the push makes a wrong one more likely" }];
const MOST_DRAWN = 50;

// The state: { policy, optimizer, pushes, stage: how many of STAGES are done, group, push: result
// of pushGroup(), isStuck: whether the group gives no gradient, shown: how many groups were shown
// before this one, tried: how many were drawn for it }
let hand = null;

function resetHand() {
  hand = { policy: copyOf(base), optimizer: newOptimizer(base), pushes: 0, stage: 0, group: null,
           push: null, shown: 0, tried: 0 };
  showHand();
}

// Draw groups, MOST_DRAWN at most, with the seeds 1, 2, 3 ... until one is fit.
function chosenGroup({ isFit }) {
  for (hand.tried = 1; ; hand.tried += 1) {
    const group = sampleGroup(hand.policy, problem, HAND_G, generator(hand.tried), USUAL);
    const push = pushGroup(copyOf(hand.policy), structuredClone(hand.optimizer), group);
    if (hand.tried === MOST_DRAWN || isFit(group, push)) return group;
  }
}

function handNext() {
  if (hand.stage === 4 || hand.isStuck) {
    Object.assign(hand, { stage: 0, push: null, shown: hand.shown + 1, tried: 0 });
  }
  if (hand.stage === 0) {
    hand.group = hand.shown < CHOSEN.length ? chosenGroup(CHOSEN[hand.shown]) :
      sampleGroup(hand.policy, problem, HAND_G, Math.random, USUAL);
  }
  if (hand.stage === 3) {
    hand.push = pushGroup(hand.policy, hand.optimizer, hand.group);
    hand.pushes += 1;
  }
  hand.stage += 1;
  showHand();
}

// ---- the tree of answers ---------------------------------------------------------------------

function showHand() {
  const { stage, group, pushes } = hand;
  hand.isStuck = stage === 3 && !teaches(group);
  byId("hand-stages").replaceChildren(...STAGES.map((name, i) => element("li",
    i < stage ? { class: "done" } : i === stage ? { "aria-current": "step" } : {}, name)));
  byId("hand-next").textContent = hand.isStuck ? "Next group" : [
    "Sample 8 answers", "Verify them", "Compare them", "Push", "Next group"][stage];
  byId("hand-reset").hidden = pushes === 0 && stage === 0;
  byId("hand-note").replaceChildren(...notesOnHand());
  byId("hand-head").hidden = stage === 0;
  const headings = [...byId("hand-head").querySelectorAll(".facts span")];
  headings.forEach((heading, i) => { heading.hidden = stage <= i; });
  byId("hand-tree").replaceChildren(
    ...(stage === 0 ? [] : branchesOf(group.completions).map(branchItem)));
}

// The tokens that some answers share, and the branches in which these answers continue.
function branchItem(branch) {
  const { group, stage, push } = hand;
  const line = emptyLine(`${branch.withIt.length} of ${HAND_G} answers`);
  for (const { id, node } of branch.tokens) {
    const next = group.tree.next[node];
    if (stage < 4) addToken(line, id, next);
    else addPushed(line, id, next, push.tokens.get(`${node}:${id}`));
  }
  const isLeaf = branch.branches.length === 0;
  const row = element("div", { class: "twig" }, line, element("div", { class: "facts" },
    element("span", {}, `${branch.withIt.length} of ${HAND_G}`),
    isLeaf && stage >= 2 ? leafFacts(branch) : []));
  const further = branch.branches.map(branchItem);
  return element("li", {}, row, further.length > 0 ? element("ul", {}, further) : null);
}

function changeOf({ before, after }) {
  return after - before;
}

// Whether the change of a probability is large enough to be shown.
function hasMoved(token) {
  return Math.abs(changeOf(token)) >= 0.005;
}

// Add a token shaded by the change of its probability, which is below it before and after.
function addPushed(line, id, next, pushed) {
  const { net, up, down, before, after } = pushed;
  const largest = Math.max(...[...hand.push.tokens.values()].map(changeOf).map(Math.abs));
  const parts = [up > 0 ? signed(up, 3) : null, down < 0 ? signed(down, 3) : null];
  const why = `pushed ${parts.filter((part) => part !== null).join(" and ")} by answers with ` +
    "this token; with the answers that have a different one here, the push on its logit is " +
    signed(net, 4);
  const token = addToken(line, id, next, { share: changeOf(pushed) / largest, why });
  if (!hasMoved(pushed)) return;
  const moved = element("span", { class: "moved" });
  token.replaceWith(moved);
  moved.append(token, element("small", { class: after > before ? "right" : "wrong" },
                              percent(before), element("br"), `→ ${percent(after)}`));
}

// The reward and advantage of an answer, and how many times as likely it is after the push.
function leafFacts({ withIt: [i] }) {
  const { group, stage, push } = hand;
  const right = group.isRight[i];
  const facts = [element("b", { class: right ? "right" : "wrong" }, right ? "✓ 1" : "✗ 0")];
  if (stage >= 3) facts.push(element("span", {}, signed(group.A[i])));
  if (stage === 4) facts.push(element("strong", {}, `× ${push.times[i].toFixed(2)}`));
  return facts;
}

// ---- the notes -------------------------------------------------------------------------------

function notesOnHand() {
  const { stage, group, pushes, shown, tried } = hand;
  const chosen = tried < 2 || tried === MOST_DRAWN ? "" :
    ` We drew ${tried} groups; this is the first ${CHOSEN[shown].why}.`;
  return [
    () => [`The base${pushes > 0 ? ` after ${plural(pushes, "push", "pushes")}` : ""} answers ` +
           "the problem at the top eight times."],
    () => ["If several answers begin in the same way, the beginning is shown once, with their " +
           `number. The more violet a token, the less likely it was.${chosen}`],
    () => ["The verifier reads the number in the answer, not the thought. " +
           `${HAND_G * mean(group.isRight)} of ${HAND_G} answers are right, and get reward 1.`],
    () => [noteOnAdvantages(group)],
    notesOnPush][stage]();
}

function noteOnAdvantages({ A, isRight, rewards }) {
  if (!hasSignal(rewards)) {
    return `All ${HAND_G} answers got a reward of ${rewards[0]}, so none is better than the mean ` +
      "and every advantage is 0. There is nothing to push.";
  }
  return "The advantage of an answer is how far its reward is from the group’s mean, in units of " +
    `the standard deviation: (1 − ${mean(rewards).toFixed(3)}) / ${std(rewards).toFixed(3)} = ` +
    `${signed(A[isRight.indexOf(1)])} if it is right, ${signed(A[isRight.indexOf(0)])} if not.`;
}

// After the push: tokens that right and wrong answers share, and a wrong answer that rose.
function notesOnPush() {
  const { group: { isRight }, push } = hand;
  const moved = [...push.tokens.values()].filter(hasMoved);
  const isAgainst = moved.some((token) => changeOf(token) * token.net < 0);
  const shared = moved.filter(({ up, down }) => up > 0 && down < 0);
  const notes = shared.map(({ id, up, down, before, after }, i) => element("p", {},
    i === 0 ? "A token that right and wrong answers share is pulled both ways. " : null,
    "Right answers push ", element("code", {}, tokenLabel(id)), ` by ${signed(up, 3)}, and wrong ` +
    `ones by ${signed(down, 3)} (each by its advantage / ${HAND_G} / its length). Its ` +
    `probability ${after > before ? "rose" : "fell"} from ${percent(before)} to ` +
    `${percent(after)}.`));
  const wrong = push.times.map((times, i) => ({ times: isRight[i] ? 0 : times, i }));
  const risen = wrong.reduce((best, one) => one.times > best.times ? one : best);
  if (risen.times > 1.02) notes.push(noteOnRisen(risen));
  return [element("p", {}, "Blue tokens are more likely after the push, orange tokens less. Where " +
    "a probability moved by half a percentage point or more, it is shown before and after." +
    (isAgainst ? " Some moved against their push, because a step also moves the other logits " +
      "there, and weights that all tokens share." : "")), ...notes];
}

// Why a wrong answer is more likely now: the one of its tokens that rose most.
function noteOnRisen({ times, i }) {
  const { group, push } = hand;
  const { tokens, nodes } = group.completions[i];
  const moved = tokens.map((id, t) => push.tokens.get(`${nodes[t]}:${id}`));
  const ratio = ({ before, after }) => after / before;
  const most = moved.reduce((best, one) => ratio(one) > ratio(best) ? one : best);
  const reason = most.net > 0 ?
    "The probabilities in one place add up to 1, and the other tokens there were pushed down " +
      "harder." :
    "It was pushed down there, too, but a step moves weights that all tokens share.";
  return element("p", {}, element("b", {}, `${extract(group.texts[i]) ?? "One answer"} is wrong, ` +
    `but ${times.toFixed(2)} times as likely as before. `),
    "Its token ", element("code", {}, tokenLabel(most.id)),
    ` rose from ${percent(most.before)} to ${percent(most.after)}. ${reason}`);
}

byId("hand-next").addEventListener("click", handNext);
byId("hand-reset").addEventListener("click", resetHand);
resetHand();
