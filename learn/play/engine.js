// grpo.py for a browser, written so that you can read it next to grpo.py. The sections have the
// same numbers, and each begins with the names of the parts of grpo.py that it contains. The task
// and the verifier are in arithmetic.js, main is in loop.js, and the warm start was done in Python.
// Two things differ from grpo.py.
//
// There is no torch. A matrix is a Float32Array, row after row. Each operation is followed by its
// gradient, which was derived by hand: linearBackward takes the gradient with respect to the output
// of linear, and adds to the gradients of its inputs. The other operations do the same. Tests
// compare all of it with torch.
//
// There is no cache. Everything that was read is in a Tree, in which the parent of a token is the
// token before it. Texts that begin in the same way share their beginning, which is read only once:
// the prompt of a group, and a thought that several answers share. Each token is read when it is
// sampled, and the values computed then are all that the gradient needs. This saves most of the
// work of a step.
//
// Shapes: B completions; n nodes of a tree, of which `rows` lists some; V vocabulary, D width,
// H heads, KV key/value heads, hd head size. A linear layer's weight is (O, I), as in torch.

// ---- 2. the algorithm ------------------------------------------------------------------------
// In grpo.py: LOSS_TYPES, advantages, log_ratio, policy_loss, aggregate, and their counterparts in
// gspo.py and reinforce.py. This file has no loss, only its gradient: how hard each token is
// pushed.

// The advantage of a reward r in a group of G rewards with this mean and std; its formula as text.
const ADVANTAGES = {
  group: { of: (r, { mean, std }) => (r - mean) / (std + 1e-4),                 // eq. (1)
           formula: "(r − mean) / (std + 0.0001)" },
  none: { of: (r, { mean }) => r - mean, formula: "r − mean" },
  mean: { of: (r, { mean }) => (r - mean) / mean, formula: "(r − mean) / mean" },
  rloo: { of: (r, { mean, G }) => r - (G * mean - r) / (G - 1),
          formula: "r − mean of the other rewards" },
};

// The weight of a token in (5). length: of its answer; T: the longest possible length; B: answers
// of the step, with numTokens tokens in total
const AVERAGES = {
  sequence_mean: { of: ({ length, B }) => 1 / (length * B),
                   formula: "1/B / the length of its answer" },
  token_mean: { of: ({ numTokens }) => 1 / numTokens,
                formula: "1 / the number of tokens in the batch" },
  constant: { of: ({ T, B }) => 1 / (T * B), formula: "1/B / the longest possible length" },
  sequence_sum: { of: ({ B }) => 1 / B, formula: "1/B" },
};

// Each method's advantage, the surrogate in place of (3), its average, and its command.
const METHODS = {
  "GRPO": { scale: "group", surrogate: "clip", average: "sequence_mean", command: "grpo.py" },
  "Dr. GRPO": { scale: "none", surrogate: "clip", average: "constant",
                command: "grpo.py --loss_type dr_grpo --scale_rewards none" },
  "MaxRL": { scale: "mean", surrogate: "clip", average: "constant",
             command: "grpo.py --loss_type dr_grpo --scale_rewards mean" },
  "DAPO": { scale: "group", surrogate: "clip", average: "token_mean",
            command: "grpo.py --loss_type dapo" },
  "CISPO": { scale: "group", surrogate: "cispo", average: "token_mean",
             command: "grpo.py --loss_type cispo" },
  "GSPO": { scale: "group", surrogate: "gspo", average: "sequence_mean", command: "gspo.py" },
  "REINFORCE": { scale: "rloo", surrogate: "none", average: "sequence_sum",
                 command: "reinforce.py --baseline rloo" },
};

// eps_low and eps_high of (3)
const CLIP_RANGES = { clip: [0.2, 0.28], cispo: [0.2, 0.28], gspo: [0.03, 0.04] };

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function std(values) {
  const center = mean(values);
  const squares = values.map((value) => (value - center) ** 2);
  return Math.sqrt(squares.reduce((a, b) => a + b, 0) / (values.length - 1));
}

function hasSignal(rewards) {
  return Math.max(...rewards) > Math.min(...rewards);
}

// The advantages of one group: (G) -> (G). Equal rewards give advantages of 0. If the baseline is a
// number, it is subtracted whatever the other rewards are.
function advantages(rewards, method, baseline = "mean") {
  if (baseline !== "mean") return rewards.map((r) => r - Number(baseline));
  const group = { mean: mean(rewards), std: std(rewards), G: rewards.length };
  const { of } = ADVANTAGES[METHODS[method].scale];
  return rewards.map((r) => hasSignal(rewards) ? of(r, group) : 0);
}

// The factor of A grad log pi(o_t) in minus the gradient of L_t, for each token of a completion:
// its ratio, or 0 where (3) clips. logps: under the current policy; oldLogps: under the policy that
// sampled. (t) -> (t)
function slopes(A, logps, oldLogps, surrogate, isClipping = true) {
  if (surrogate === "none") return logps.map(() => 1);
  const [low, high] = isClipping ? CLIP_RANGES[surrogate] : [Infinity, Infinity];
  const logRatios = logps.map((logp, t) => logp - oldLogps[t]);
  const ratios = surrogate !== "gspo" ? logRatios.map(Math.exp) :
    logRatios.fill(Math.exp(mean(logRatios)));                              // s_i, for all tokens
  if (surrogate === "cispo") return ratios.map((ratio) => Math.min(ratio, 1 + high));   // eq. (6)
  const isClipped = (ratio) => A > 0 ? ratio > 1 + high : ratio < 1 - low;
  return ratios.map((ratio) => isClipped(ratio) ? 0 : ratio);                   // eq. (3)
}

// How hard each token of a completion is pushed: the factors of grad log pi(o_t) in minus the
// gradient of (5), or of the loss that the method has instead. step: { B, T, numTokens }. (t) ->
// (t)
function pushes(A, logps, oldLogps, method, step, isClipping = true) {
  const { surrogate, average } = METHODS[method];
  const weight = AVERAGES[average].of({ ...step, length: logps.length });
  return slopes(A, logps, oldLogps, surrogate, isClipping).map((slope) => A * slope * weight);
}

// ---- 3. the update ---------------------------------------------------------------------------
// In grpo.py: update, with torch's clip_grad_norm_ and AdamW. The gradient is in backward, below.

// One step of AdamW with torch's defaults and no weight decay. A gradient that is longer than 1 is
// first scaled down to norm 1. -> the norm before
function adamW(policy, gradient, optimizer, learningRate) {
  const [beta1, beta2, eps] = [0.9, 0.999, 1e-8];
  const norm = Math.sqrt(gradient.data.reduce((sum, g) => sum + g * g, 0));
  const scale = Math.min(1, 1 / (norm + 1e-6));
  const { m, v } = optimizer;
  optimizer.steps += 1;
  const mScale = 1 - beta1 ** optimizer.steps;
  const vScale = 1 - beta2 ** optimizer.steps;
  for (let i = 0; i < policy.data.length; i++) {
    const g = gradient.data[i] * scale;
    m[i] += (1 - beta1) * (g - m[i]);
    v[i] += (1 - beta2) * (g * g - v[i]);
    policy.data[i] -= learningRate * (m[i] / mScale) / (Math.sqrt(v[i] / vScale) + eps);
  }
  return norm;
}

function newOptimizer(policy) {
  const size = policy.data.length;
  return { m: new Float32Array(size), v: new Float32Array(size), steps: 0 };
}

// ---- 5. tokenizer ----------------------------------------------------------------------------
// In grpo.py: TOKENIZER, encode_prompts, decode. The verifier is in arithmetic.js.

const utf8 = new TextEncoder();

// Token ids of a prompt: its bytes, padded on the left to the width of the longest problem.
function encodePrompt(prompt, cfg) {
  const bytes = Array.from(utf8.encode(prompt));
  const padding = Array(cfg.promptWidth - bytes.length).fill(cfg.PAD);
  return [...padding, ...bytes];
}

function bytesOf(id, cfg) {
  if (id < 256) return [id];
  const special = cfg.specialTokens[id - 256];
  return special === undefined ? [0xff] : Array.from(utf8.encode(special));
}

// The text of token ids. Anything that is not UTF-8, or not a token, becomes U+FFFD.
function decode(ids, cfg) {
  const bytes = Uint8Array.from(ids.flatMap((id) => bytesOf(id, cfg)));
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
}

// ---- 6. the policy ---------------------------------------------------------------------------
// In grpo.py: rotate, Attention, MLP, Block, GPT; logprobs (here predict), score (here readAgain
// and logProbs); and backward, from section 3.

// A matrix of some columns to which rows can be added; new ones are 0.
class Matrix {
  constructor(columns, rows = 64) {
    this.columns = columns;
    this.data = new Float32Array(rows * columns);
  }

  grow(rows) {
    const size = rows * this.columns;
    if (size <= this.data.length) return;
    const larger = new Float32Array(2 * size);
    larger.set(this.data);
    this.data = larger;
  }

  row(i) {
    return this.data.subarray(i * this.columns, (i + 1) * this.columns);
  }
}

// The weights of a GPT under their names in grpo.py, such as policy.blocks[0].up.weight, as parts
// of one array. shapes: [name, O, I] of each weight, in the order of the array. The gradient of a
// policy has the same form.
function viewWeights(cfg, shapes, data) {
  const policy = { cfg, shapes, data };
  let start = 0;
  for (const [name, O, I] of shapes) {
    const path = name.split(".");
    const last = path.pop();
    const owner = path.reduce((object, part) => object[part] ??= {}, policy);
    owner[last] = { data: data.subarray(start, start + O * I), O, I };
    start += O * I;
  }
  policy.blocks = Object.values(policy.blocks);
  return policy;
}

function copyOf(policy) {
  return viewWeights(policy.cfg, policy.shapes, policy.data.slice());
}

function zerosLike(policy) {
  return viewWeights(policy.cfg, policy.shapes, new Float32Array(policy.data.length));
}

// The tokens that a policy has read, and its probabilities of each next token at one temperature.
class Tree {
  constructor(policy, temperature = 1) {
    this.policy = policy;
    this.temperature = temperature;
    this.roots = new Map();             // token -> node
    this.tokens = [];                   // these four lists have one entry per node
    this.children = [];                 // token -> node
    this.paths = [];                    // the nodes that a node attends to: from its root to itself
    this.next = [];                     // { p (V), entropy } of the next token, see predict()
    this.numRead = 0;
    this.layers = policy.blocks.map(() => activations(policy.cfg));
    this.output = new Matrix(policy.cfg.D);
    this.hidden = new Matrix(policy.cfg.D);
  }

  // Add a token after a node, or as the first token (-1). -> its node
  add(parent, token) {
    const siblings = parent < 0 ? this.roots : this.children[parent];
    if (siblings.has(token)) return siblings.get(token);
    const node = this.tokens.length;
    siblings.set(token, node);
    this.tokens.push(token);
    this.children.push(new Map());
    this.paths.push(Int32Array.of(...(parent < 0 ? [] : this.paths[parent]), node));
    return node;
  }

  // Add several tokens, one after the other. -> the node of the last
  addAll(parent, tokens) {
    return tokens.reduce((node, token) => this.add(node, token), parent);
  }

  matrices() {
    const parts = this.layers.flatMap((layer) => Object.values(layer));
    return [...parts, this.output, this.hidden].filter((part) => part instanceof Matrix);
  }
}

// The values that a block computes for each node, or their gradients. weights: for each node, how
// much its heads attend to the nodes on its path (H, length of the path).
function activations({ D, H, KV, F }, rows) {
  const columns = { input: D, normed: D, q: D, k: KV * D / H, v: KV * D / H, attended: D,
                    middle: D, middleNormed: D, gate: F, up: F, activated: F };
  const parts = Object.entries(columns).map(([name, width]) => [name, new Matrix(width, rows)]);
  return { ...Object.fromEntries(parts), weights: [] };
}

// y += x w^T in some rows. (n, I), (O, I) -> (n, O)
function linear({ data: y }, { data: x }, { data: w, O, I }, rows) {
  for (const row of rows) {
    for (let o = 0; o < O; o++) y[row * O + o] += dot(w, o * I, x, row * I, I);
  }
}

// The dot product of n numbers of w and of x, in four sums, so that no addition waits for another.
function dot(w, W, x, X, n) {
  let a = 0, b = 0, c = 0, d = 0;
  let i = 0;
  for (; i + 4 <= n; i += 4) {
    a += w[W + i] * x[X + i];
    b += w[W + i + 1] * x[X + i + 1];
    c += w[W + i + 2] * x[X + i + 2];
    d += w[W + i + 3] * x[X + i + 3];
  }
  for (; i < n; i++) a += w[W + i] * x[X + i];
  return a + b + c + d;
}

// dx += dy w and dw += dy^T x
function linearBackward(dx, dw, dy, x, { data: w, O, I }, rows) {
  const columns = Array.from({ length: O }, (_, o) => o);
  for (const row of rows) addWeighted(dx.data, row * I, w, columns, dy.data, row * O, 1, I);
  for (const o of columns) addWeighted(dw.data, o * I, x.data, rows, dy.data, o, O, I);
}

// y[at ...] += the sum over k of rows: factors[first + k * stride] * x[k]   (x: rows of I numbers)
function addWeighted(y, at, x, rows, factors, first, stride, I) {
  let m = 0;
  for (; m + 4 <= rows.length; m += 4) {
    const r0 = rows[m], r1 = rows[m + 1], r2 = rows[m + 2], r3 = rows[m + 3];
    const a = factors[first + r0 * stride];
    const b = factors[first + r1 * stride];
    const c = factors[first + r2 * stride];
    const d = factors[first + r3 * stride];
    const x0 = r0 * I, x1 = r1 * I, x2 = r2 * I, x3 = r3 * I;
    for (let i = 0; i < I; i++) {
      y[at + i] += a * x[x0 + i] + b * x[x1 + i] + c * x[x2 + i] + d * x[x3 + i];
    }
  }
  for (; m < rows.length; m++) {
    const factor = factors[first + rows[m] * stride];
    const start = rows[m] * I;
    for (let i = 0; i < I; i++) y[at + i] += factor * x[start + i];
  }
}

// y = x / rms(x) * w, rms the root of the mean square
function rmsNorm(y, x, { data: w, O: D }, rows, eps) {
  for (const row of rows) {
    const start = row * D;
    const scale = inverseRms(x.data, start, D, eps);
    for (let i = 0; i < D; i++) y.data[start + i] = x.data[start + i] * scale * w[i];
  }
}

function inverseRms(x, start, D, eps) {
  return 1 / Math.sqrt(dot(x, start, x, start, D) / D + eps);
}

// The second term exists because x also changes its rms, by which all elements are divided.
function rmsNormBackward(dx, dw, dy, x, { data: w, O: D }, rows, eps) {
  for (const row of rows) {
    const start = row * D;
    const scale = inverseRms(x.data, start, D, eps);
    let sum = 0;
    for (let i = 0; i < D; i++) sum += dy.data[start + i] * w[i] * x.data[start + i];
    for (let i = 0; i < D; i++) {
      const slope = dy.data[start + i];
      dw.data[i] += slope * x.data[start + i] * scale;
      dx.data[start + i] += slope * w[i] * scale - x.data[start + i] * sum * scale ** 3 / D;
    }
  }
}

// Rotary positions: pairs of features turn by an angle that grows with the position. The direction
// -1 turns them back, which is also the gradient.
function rotate(x, tree, rows, direction) {
  const { D, H } = tree.policy.cfg;
  const hd = D / H;
  const half = hd / 2;
  for (const row of rows) {
    const position = tree.paths[row].length - 1;
    for (let j = 0; j < half; j++) {
      const angle = direction * position * 10000 ** (-j / half);
      const cos = Math.cos(angle);
      const sin = Math.sin(angle);
      for (let at = row * x.columns + j; at < (row + 1) * x.columns; at += hd) {
        const left = x.data[at];
        const right = x.data[at + half];
        x.data[at] = left * cos - right * sin;
        x.data[at + half] = left * sin + right * cos;
      }
    }
  }
}

// Each head of a node mixes the values on its path, weighted by how well their keys fit its query.
function attend(layer, tree, rows) {
  const { D, H, KV } = tree.policy.cfg;
  const hd = D / H;
  const [Q, K, values, out] = [layer.q.data, layer.k.data, layer.v.data, layer.attended.data];
  for (const row of rows) {
    const path = tree.paths[row];
    const weights = new Float32Array(H * path.length);
    for (let h = 0; h < H; h++) {
      const own = row * D + h * hd;                     // where this head's query begins
      const kvHead = Math.floor(h * KV / H) * hd;
      const p = weights.subarray(h * path.length, (h + 1) * path.length);
      for (let k = 0; k < path.length; k++) {
        p[k] = dot(Q, own, K, path[k] * KV * hd + kvHead, hd) / Math.sqrt(hd);
      }
      softmax(p);
      for (let k = 0; k < path.length; k++) {
        const other = path[k] * KV * hd + kvHead;
        for (let j = 0; j < hd; j++) out[own + j] += p[k] * values[other + j];
      }
    }
    layer.weights[row] = weights;
  }
}

function attendBackward(gradient, layer, tree, rows) {
  const { D, H, KV } = tree.policy.cfg;
  const hd = D / H;
  const [Q, K, values] = [layer.q.data, layer.k.data, layer.v.data];
  const [dQ, dK, dValues, dOut] =
    [gradient.q.data, gradient.k.data, gradient.v.data, gradient.attended.data];
  for (const row of rows) {
    const path = tree.paths[row];
    const slopes = new Float32Array(path.length);       // gradients of the attention weights
    for (let h = 0; h < H; h++) {
      const own = row * D + h * hd;
      const kvHead = Math.floor(h * KV / H) * hd;
      const p = layer.weights[row].subarray(h * path.length, (h + 1) * path.length);
      let center = 0;
      for (let k = 0; k < path.length; k++) {
        const other = path[k] * KV * hd + kvHead;
        for (let j = 0; j < hd; j++) dValues[other + j] += p[k] * dOut[own + j];
        slopes[k] = dot(dOut, own, values, other, hd);
        center += p[k] * slopes[k];
      }
      for (let k = 0; k < path.length; k++) {
        const other = path[k] * KV * hd + kvHead;
        const slope = p[k] * (slopes[k] - center) / Math.sqrt(hd);    // gradient of the dot product
        for (let j = 0; j < hd; j++) {
          dQ[own + j] += slope * K[other + j];
          dK[other + j] += slope * Q[own + j];
        }
      }
    }
  }
}

// Turn numbers into probabilities, in place. (n) -> (n)
function softmax(x, temperature = 1) {
  let most = -Infinity;
  for (let i = 0; i < x.length; i++) most = Math.max(most, x[i]);
  let sum = 0;
  for (let i = 0; i < x.length; i++) {
    x[i] = Math.exp((x[i] - most) / temperature);
    sum += x[i];
  }
  for (let i = 0; i < x.length; i++) x[i] /= sum;
}

// SwiGLU: silu(gate) * up
function activate(layer, rows) {
  const { gate, up, activated } = layer;
  for (const row of rows) {
    for (let at = row * gate.columns; at < (row + 1) * gate.columns; at++) {
      const sigmoid = 1 / (1 + Math.exp(-gate.data[at]));
      activated.data[at] = gate.data[at] * sigmoid * up.data[at];
    }
  }
}

function activateBackward(gradient, layer, rows) {
  const { gate, up } = layer;
  for (const row of rows) {
    for (let at = row * gate.columns; at < (row + 1) * gate.columns; at++) {
      const sigmoid = 1 / (1 + Math.exp(-gate.data[at]));
      const silu = gate.data[at] * sigmoid;
      const slope = gradient.activated.data[at];
      gradient.up.data[at] += slope * silu;
      gradient.gate.data[at] += slope * up.data[at] * (sigmoid + silu * (1 - sigmoid));
    }
  }
}

function addRows(y, x, rows) {
  for (const row of rows) {
    for (let at = row * x.columns; at < (row + 1) * x.columns; at++) y.data[at] += x.data[at];
  }
}

// Compute h = x + attention(norm(x)), then h + mlp(norm(h)), which goes to `output`.
function readBlock(block, layer, output, tree, rows) {
  const { eps } = tree.policy.cfg;
  rmsNorm(layer.normed, layer.input, block.attention_norm.weight, rows, eps);
  linear(layer.q, layer.normed, block.query.weight, rows);
  linear(layer.k, layer.normed, block.key.weight, rows);
  linear(layer.v, layer.normed, block.value.weight, rows);
  rotate(layer.q, tree, rows, 1);
  rotate(layer.k, tree, rows, 1);
  attend(layer, tree, rows);
  addRows(layer.middle, layer.input, rows);
  linear(layer.middle, layer.attended, block.out.weight, rows);

  rmsNorm(layer.middleNormed, layer.middle, block.mlp_norm.weight, rows, eps);
  linear(layer.gate, layer.middleNormed, block.gate.weight, rows);
  linear(layer.up, layer.middleNormed, block.up.weight, rows);
  activate(layer, rows);
  addRows(output, layer.middle, rows);
  linear(output, layer.activated, block.down.weight, rows);
}

// The backward pass of a block. gradient: of its weights; d: of its activations, all 0 at first.
function readBlockBackward(gradient, d, dOutput, block, layer, tree, rows) {
  const { eps } = tree.policy.cfg;
  linearBackward(d.activated, gradient.down.weight, dOutput,
                 layer.activated, block.down.weight, rows);
  addRows(d.middle, dOutput, rows);
  activateBackward(d, layer, rows);
  linearBackward(d.middleNormed, gradient.up.weight, d.up,
                 layer.middleNormed, block.up.weight, rows);
  linearBackward(d.middleNormed, gradient.gate.weight, d.gate,
                 layer.middleNormed, block.gate.weight, rows);
  rmsNormBackward(d.middle, gradient.mlp_norm.weight, d.middleNormed,
                  layer.middle, block.mlp_norm.weight, rows, eps);

  linearBackward(d.attended, gradient.out.weight, d.middle,
                 layer.attended, block.out.weight, rows);
  addRows(d.input, d.middle, rows);
  attendBackward(d, layer, tree, rows);
  rotate(d.k, tree, rows, -1);
  rotate(d.q, tree, rows, -1);
  linearBackward(d.normed, gradient.value.weight, d.v,
                 layer.normed, block.value.weight, rows);
  linearBackward(d.normed, gradient.key.weight, d.k,
                 layer.normed, block.key.weight, rows);
  linearBackward(d.normed, gradient.query.weight, d.q,
                 layer.normed, block.query.weight, rows);
  rmsNormBackward(d.input, gradient.attention_norm.weight, d.normed,
                  layer.input, block.attention_norm.weight, rows, eps);
}

// Read the nodes that were added to a tree since the last time, all at once.
function read(tree) {
  const { policy, layers } = tree;
  const total = tree.tokens.length;
  const rows = Array.from({ length: total - tree.numRead }, (_, i) => tree.numRead + i);
  for (const matrix of tree.matrices()) matrix.grow(total);
  for (const row of rows) {
    layers[0].input.row(row).set(rowOf(policy.embed.weight, tree.tokens[row]));
  }
  policy.blocks.forEach((block, i) => {
    const output = i + 1 < layers.length ? layers[i + 1].input : tree.output;
    readBlock(block, layers[i], output, tree, rows);
  });
  rmsNorm(tree.hidden, tree.output, policy.norm.weight, rows, policy.cfg.eps);
  tree.numRead = total;
}

function rowOf({ data, I }, row) {
  return data.subarray(row * I, (row + 1) * I);
}

// Compute for each of these nodes the probability of every next token, and the entropy in nats.
function predict(tree, nodes) {
  const { embed } = tree.policy;
  const rows = [...new Set(nodes)].filter((node) => tree.next[node] === undefined);
  const logits = new Matrix(embed.weight.O, tree.tokens.length);
  linear(logits, tree.hidden, embed.weight, rows);
  for (const row of rows) {
    const p = logits.row(row).slice();
    softmax(p, tree.temperature);
    let entropy = 0;
    for (const one of p) if (one > 0) entropy -= one * Math.log(one);
    tree.next[row] = { p, entropy };
  }
}

// log pi(o_1), log pi(o_2) ... of a completion that a tree predicted
function logProbs(tree, { tokens, nodes }) {
  return tokens.map((token, t) => Math.log(tree.next[nodes[t]].p[token]));
}

// The same completions in a different tree, that of a different policy.
function readAgain(tree, completions) {
  const { cfg } = tree.policy;
  const again = completions.map(({ prompt, tokens }) => {
    let node = tree.addAll(-1, encodePrompt(prompt, cfg));
    const nodes = [node];
    for (const token of tokens.slice(0, -1)) {
      node = tree.add(node, token);
      nodes.push(node);
    }
    return { prompt, tokens, nodes };
  });
  read(tree);
  predict(tree, again.flatMap(({ nodes }) => nodes));
  return again;
}

// Add the gradient of - sum_i sum_t pushes[i][t] log pi(o_t), over completions i of a tree.
function backward(gradient, tree, completions, pushes) {
  const { policy, layers } = tree;
  const { D, eps } = policy.cfg;
  const total = tree.tokens.length;

  // the gradient of -log softmax(logits / temperature)[token]: p, minus 1 at the token, divided by
  // the temperature
  const dLogits = new Matrix(policy.embed.weight.O, total);
  const predicting = new Set();
  completions.forEach(({ tokens, nodes }, i) => tokens.forEach((token, t) => {
    const push = pushes[i][t] / tree.temperature;
    if (push === 0) return;
    const slopes = dLogits.row(nodes[t]);
    const { p } = tree.next[nodes[t]];
    for (let v = 0; v < p.length; v++) slopes[v] += push * p[v];
    slopes[token] -= push;
    predicting.add(nodes[t]);
  }));
  const rows = [...new Set([...predicting].flatMap((node) => [...tree.paths[node]]))];

  // the backward pass through everything that was computed
  const dHidden = new Matrix(D, total);
  let dOutput = new Matrix(D, total);
  linearBackward(dHidden, gradient.embed.weight, dLogits, tree.hidden, policy.embed.weight,
                 [...predicting]);
  rmsNormBackward(dOutput, gradient.norm.weight, dHidden, tree.output, policy.norm.weight, rows,
                  eps);
  for (let i = layers.length - 1; i >= 0; i--) {
    const d = activations(policy.cfg, total);
    readBlockBackward(gradient.blocks[i], d, dOutput, policy.blocks[i], layers[i], tree, rows);
    dOutput = d.input;
  }
  for (const row of rows) {
    const slopes = rowOf(gradient.embed.weight, tree.tokens[row]);
    dOutput.row(row).forEach((slope, i) => slopes[i] += slope);
  }
}

// ---- 7. rollouts -----------------------------------------------------------------------------
// In grpo.py: sample_token, rollout, and complete.

// Sample one token by inverse CDF; without a uniform number, take the most likely. (V) -> token
function sampleToken(p, uniform) {
  if (uniform === null) return p.indexOf(Math.max(...p));
  let cdf = 0;
  for (let v = 0; v < p.length; v++) {
    cdf += p[v];
    if (uniform < cdf) return v;
  }
  return p.findLastIndex((one) => one > 0);           // the sum can end just below 1
}

// Complete prompts in a tree, one token of each at a time. uniforms[i * T + t] draws token t of
// completion i; without uniforms, decoding is greedy. forced: tokens that each completion has to
// begin with, but does not contain. Yields the completions after each token, and returns them:
// their tokens, and for each token the node that predicted it.
function* rollout(tree, prompts, uniforms = null, forced = []) {
  const { cfg } = tree.policy;
  const { EOS, T } = cfg;
  const completions = prompts.map((prompt) => ({ prompt, tokens: [], nodes: [] }));
  let ends = prompts.map((prompt) => tree.addAll(-1, [...encodePrompt(prompt, cfg), ...forced]));
  let rows = prompts.map((_, i) => i);                  // completions that have not ended
  for (let t = 0; t < T && rows.length > 0; t++) {
    read(tree);
    predict(tree, rows.map((i) => ends[i]));
    for (const i of rows) {
      const { p } = tree.next[ends[i]];
      const token = sampleToken(p, uniforms && uniforms[i * T + t]);
      completions[i].tokens.push(token);
      completions[i].nodes.push(ends[i]);
    }
    yield completions;
    rows = rows.filter((i) => completions[i].tokens[t] !== EOS);
    if (t + 1 < T) for (const i of rows) ends[i] = tree.add(ends[i], completions[i].tokens[t]);
  }
  return completions;
}

// Run a generator to its end. -> its return value
function finish(steps) {
  for (;;) {
    const { value, done } = steps.next();
    if (done) return value;
  }
}

function completionText({ tokens }, cfg) {
  return decode(tokens.filter((token) => token !== cfg.EOS), cfg);
}

function uniformNumbers(count, random) {
  return Float64Array.from({ length: count }, random);
}

// ---- the weights in the page -----------------------------------------------------------------

function bytesOfBase64(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0)).buffer;
}

// Decode a half-precision number: 1 bit for the sign, 5 for the exponent, 10 for the fraction.
function float16(bits) {
  const sign = bits >> 15 ? -1 : 1;
  const exponent = bits >> 10 & 31;
  const fraction = (bits & 1023) / 1024;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
}

// Unpack the two policies that build.py packed: the base in half precision, and the trained policy
// as its difference from the base, in 8 bits. -> { base, trained }
function unpack({ shapes, scale, base: halves, difference }, cfg) {
  const data = Float32Array.from(new Uint16Array(bytesOfBase64(halves)), float16);
  const base = viewWeights(cfg, shapes, data);
  const trained = copyOf(base);
  new Int8Array(bytesOfBase64(difference)).forEach((step, i) => trained.data[i] += step * scale);
  return { base, trained };
}
