// One group, one click a stage: sample, verify, compare, push.

const HAND_G = 8;
const STAGES = ["sample", "verify", "advantage", "push"];

// What is shown: { policy, optimizer, pushes, stage: how many of STAGES are done, group, push: what
// pushGroup() returned, isStuck: whether there is none, tried: how many groups were drawn }
let hand = null;

function handAnew() {
  hand = { policy: copyOf(base), optimizer: newOptimizer(base), pushes: 0, stage: 0, group: null,
           push: null, tried: 0 };
  showHand();
}

// The first of the groups with the seeds 1, 2, 3 ... in which right and wrong answers share a
// token, and a push makes a wrong one likelier.
function tellingGroup() {
  for (hand.tried = 1; ; hand.tried += 1) {
    const group = sampleGroup(base, problem, HAND_G, generator(hand.tried), USUAL);
    const { times, tokens } = pushGroup(copyOf(base), newOptimizer(base), group);
    const isTelling = times.some((factor, i) => !group.isRight[i] && factor > 1.02) &&
      [...tokens.values()].some(({ up, down }) => up > 0 && down < 0);
    if (isTelling || hand.tried === 50) return group;
  }
}

function handNext() {
  if (hand.stage === 4 || hand.isStuck) Object.assign(hand, { stage: 0, push: null, tried: 0 });
  if (hand.stage === 0) {
    hand.group = hand.group === null ? tellingGroup() :
      sampleGroup(hand.policy, problem, HAND_G, Math.random, USUAL);
  }
  if (hand.stage === 3) {
    hand.push = pushGroup(hand.policy, hand.optimizer, hand.group);
    hand.pushes += 1;
  }
  hand.stage += 1;
  showHand();
}

// ---- what is seen of it ----------------------------------------------------------------------

function showHand() {
  const { stage, group, pushes } = hand;
  hand.isStuck = stage === 3 && !teaches(group);
  byId("hand-stages").replaceChildren(...STAGES.map((name, i) => element("li",
    i < stage ? { class: "done" } : i === stage ? { "aria-current": "step" } : {}, name)));
  byId("hand-next").textContent = hand.isStuck ? "Next group" : [
    "Sample 8 answers", "Verify them", "Compare them", "Push", "Next group"][stage];
  byId("hand-anew").hidden = pushes === 0 && stage === 0;
  byId("hand-note").replaceChildren(...notesOnHand());
  byId("hand-head").hidden = stage === 0;
  byId("hand-tree").replaceChildren(
    ...(stage === 0 ? [] : branchesOf(group.completions).map(branchItem)));
}

// Tokens that some answers share, and how they go on.
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

// A token shaded by its push; below it, its chance before and after, if that has moved.
function addPushed(line, id, next, { net, up, down, before, after }) {
  const hardest = Math.max(...[...hand.push.tokens.values()].map((one) => Math.abs(one.net)));
  const parts = [up > 0 ? signed(up, 3) : null, down < 0 ? signed(down, 3) : null];
  const why = `pushed ${parts.filter((part) => part !== null).join(" and ")} by answers that ` +
    "have it; with those that have another one here, its logit is pushed " + signed(net, 4);
  const token = addToken(line, id, next, { share: net / hardest, why });
  if (Math.abs(after - before) < 0.005) return;
  const moved = element("span", { class: "moved" });
  token.replaceWith(moved);
  moved.append(token, element("small", { class: after > before ? "right" : "wrong" },
                              `${percent(before)} → ${percent(after)}`));
}

// Reward, advantage, and how much likelier an answer is now.
function leafFacts({ withIt: [i] }) {
  const { group, stage, push } = hand;
  const right = group.isRight[i];
  const facts = [element("b", { class: right ? "right" : "wrong" }, right ? "✓ 1" : "✗ 0")];
  if (stage >= 3) facts.push(element("span", {}, signed(group.A[i])));
  if (stage === 4) facts.push(element("strong", {}, `× ${push.times[i].toFixed(2)}`));
  return facts;
}

// ---- what is said of it ----------------------------------------------------------------------

function notesOnHand() {
  const { stage, group, pushes, tried } = hand;
  const chosen = tried < 2 || tried === 50 ? "" : ` Of ${tried} groups drawn, this is the first in ` +
    "which right and wrong answers share a token, and the push makes a wrong one likelier.";
  return [
    () => [`The base${pushes > 0 ? ` after ${plural(pushes, "push", "pushes")}` : ""} answers ` +
           "the problem at the top eight times."],
    () => ["What begins alike is written once, with how many of the eight answers have it. The " +
           `stronger its violet, the less likely a token was.${chosen}`],
    () => ["The verifier reads the number in the answer, not the thought: " +
           `${HAND_G * mean(group.isRight)} of ${HAND_G} are right, and earn 1.`],
    () => [noteOnAdvantages(group)],
    notesOnPush][stage]();
}

function noteOnAdvantages({ A, isRight, rewards }) {
  if (!hasSignal(rewards)) {
    return `All ${HAND_G} earned ${rewards[0]}: none is better than the mean, every advantage is ` +
      "0. No signal, nothing to push.";
  }
  return "What counts is how far an answer is from the group’s mean, in units of the standard " +
    `deviation: (1 − ${mean(rewards).toFixed(3)}) / ${std(rewards).toFixed(3)} = ` +
    `${signed(A[isRight.indexOf(1)])} if it is right, ${signed(A[isRight.indexOf(0)])} if not.`;
}

// After the push: the tokens that right and wrong answers share, and a wrong answer that rose.
function notesOnPush() {
  const { group: { isRight }, push } = hand;
  const shared = [...push.tokens.values()].filter(({ up, down, before, after }) =>
    up > 0 && down < 0 && Math.abs(after - before) >= 0.005);
  const said = shared.map(({ id, up, down, before, after }) => element("p", {},
    "Right answers push ", element("code", {}, tokenLabel(id)), ` by ${signed(up, 3)}, wrong ones ` +
    `by ${signed(down, 3)} (each its advantage / ${HAND_G} / its length): it ` +
    `${after > before ? "rose" : "fell"} from ${percent(before)} to ${percent(after)}.`));
  const wrong = push.times.map((times, i) => ({ times: isRight[i] ? 0 : times, i }));
  const risen = wrong.reduce((best, one) => one.times > best.times ? one : best);
  if (risen.times > 1.02) said.push(noteOnRisen(risen));
  return [element("p", {}, "Blue was pushed up, orange down; below, the chance before and after " +
    "where it moved by half a point."), ...said];
}

// Why a wrong answer is likelier now: the token of it that rose most.
function noteOnRisen({ times, i }) {
  const { group, push } = hand;
  const { tokens, nodes } = group.completions[i];
  const moved = tokens.map((id, t) => push.tokens.get(`${nodes[t]}:${id}`));
  const ratio = ({ before, after }) => after / before;
  const most = moved.reduce((best, one) => ratio(one) > ratio(best) ? one : best);
  const reason = most.net > 0 ?
    "The chances in one place add up to 1, and what stands beside it was pushed down harder." :
    "It was pushed down there, too, but a step moves weights that all tokens share.";
  return element("p", {}, element("b", {}, `${extract(group.texts[i]) ?? "One"} is wrong, and ` +
    `${times.toFixed(2)} times as likely now. `), "Its ", element("code", {}, tokenLabel(most.id)),
    ` rose from ${percent(most.before)} to ${percent(most.after)}. ${reason}`);
}

byId("hand-next").addEventListener("click", handNext);
byId("hand-anew").addEventListener("click", handAnew);
handAnew();
