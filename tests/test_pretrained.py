"""Test that pretrained/train.py computes the same numbers as the scripts, on transformers models of
several families, and that stopped runs resume exactly."""
import copy
import dataclasses
import functools
import json
import math
import runpy
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from small_models import FAMILIES, LIKE_SMALL, NEEDS, attempt, config_of, load_example, save_random
from small_runs import SMALL, arguments, at_work, difference, leaves, lines, read_summary, steps
from update_scenes import shift

import common
import grpo
import gspo
import plumbing
from pretrained import export
from report import ask
from report.observers import warnings
from tasks import calls, rewards

transformers = pytest.importorskip("transformers", reason=NEEDS)
from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import processors  # noqa: E402

import real  # noqa: E402  (after the line that may skip)
from pretrained import models, sampler  # noqa: E402
from pretrained import run as processes  # noqa: E402

pretrained = load_example()
PROMPTS = ["(3+4)=", "3>", "((((3+4)-5)*4)-2)=", "12", "Say yes:"]


def problems_of(prompts, G=1):
    return [common.Problem(text, "") for text in prompts for _ in range(G)]


@pytest.fixture
def run(tmp_path, small_llama):
    """run(name, **flags): train in a new folder of the test. -> folder"""
    return functools.partial(run_in, tmp_path, small_llama)


def run_in(folder, small_llama, name="run", **flags):
    with at_work(folder):
        pretrained.main(arguments(LIKE_SMALL | {
            "model": small_llama, "output_dir": name, "max_steps": 3} | flags))
    return folder / name


TWO = {"max_steps": 2, "save_steps": 1, "lr_scheduler_type": "linear"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small_llama):
    """The folder of an uninterrupted run of two steps, with a checkpoint for each."""
    return run_in(tmp_path_factory.mktemp("whole"), small_llama, **TWO)


def resume(folder, **flags):
    with at_work(folder.parent):
        pretrained.main(arguments({"resume_from_checkpoint": folder} | flags))


def outcome(folder):
    """Collect all values that a run writes, except for times. -> {path: value}"""
    record = torch.load(folder / "checkpoint.pt", weights_only=True)
    [path] = folder.glob("checkpoint-*")
    model = models.load_model(path)
    found = leaves({
        "model": model.state_dict(), "optimizer": record["weights"], "state": record["state"],
        "summary": read_summary(folder),
        "logs": {path.name: lines(path) for path in folder.glob("*.jsonl")}})
    return {path: value for path, value in found.items()
            if "step_time" not in path and "seconds" not in path}


# ---- the same equations ----------------------------------------------------------------------

@pytest.fixture(scope="module")
def off_policy(small_base, tmp_path_factory):
    """A batch sampled by the base, a policy some way off from the base, the log-probs of a
    reference, and a folder with the policy as a Llama."""
    sampler, cfg = export.read_policy(small_base, "checkpoint.pt")
    batch = grpo.sample_batch(sampler, common.load_task(cfg, grpo.verify), cfg, 0)
    batch.is_truncated[::5] = True                      # to detect rows left out
    generator = torch.Generator().manual_seed(0)
    policy = copy.deepcopy(sampler)
    shift(policy, 0.01, generator)
    reference = copy.deepcopy(sampler)
    shift(reference, 0.01, generator)
    with torch.no_grad():
        ref_logps, _ = grpo.score(reference, batch.prompts, batch.tokens)
    run = shutil.copytree(small_base, tmp_path_factory.mktemp("scene") / "run")
    plumbing.write(run / "checkpoint.pt", {"policy": policy.state_dict()})
    export.export(run, run.parent / "llama")
    return batch, policy, ref_logps, run.parent / "llama"


def check_gradients(model, policy):
    """Check that a model of transformers has the gradients of one of our policies."""
    ours = {export.llama_name(name): weight.grad for name, weight in policy.named_parameters()}
    theirs = {name: weight.grad for name, weight in model.model.named_parameters()}
    scale = max(1, *(gradient.abs().max().item() for gradient in ours.values()))
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize("script, flags", [
    (grpo, {"loss_type": "dr_grpo", "beta": 0.3, "kl_estimator": "k2"}),
    (gspo, {"loss_type": "dapo", "beta": 0.1, "mask_truncated_completions": True}),
    (grpo, {"loss_type": "cispo", "beta": 0.3, "kl_estimator": "k3_ratio"}),
    (grpo, {"delta": 1.4, "epsilon": 0.1, "epsilon_high": 0.1, "temperature": 0.7})])
def test_loss_and_gradient_are_those_of_the_script_off_policy(script, off_policy, flags):
    """Compare on part of a batch, in micro-batches. Advantages differ within a row, as if they were
    weighted. GSPO computes activations twice (gradient checkpointing)."""
    batch, policy, ref_logps, llama = off_policy
    rows = torch.arange(3, len(batch.texts))
    w = 0.5 + torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    A = w * script.advantages(batch.rewards).view(-1, 1)
    ranges = {name: getattr(script.Config(), name) for name in ("epsilon", "epsilon_high")}
    flags = ranges | flags | {"micro_batch_size": 5, "max_completion_length": 16, "device": "cpu"}
    policy.zero_grad()
    found = script.backward(policy, batch, ref_logps, A, rows, script.Config(**flags))
    cfg = config_of(method=script.__name__, gradient_checkpointing=script is gspo, **flags)
    model = pretrained.Policy(llama, cfg)
    weights = list(model.model.parameters())
    again = pretrained.backward(model, weights, batch, ref_logps, A, rows, cfg)
    for name in found.keys() & again.keys():
        assert again[name] == pytest.approx(found[name], rel=1e-5, abs=1e-6), name
    assert again["max_log_ratio"] > 0.05
    check_gradients(model, policy)


@pytest.mark.parametrize("script, flags", [
    (grpo, {"num_mini_batches": 2, "num_iterations": 2, "beta": 0.05}),
    (gspo, {"temperature": 0.7, "max_grad_norm": 0.1, "epsilon": 0.03, "epsilon_high": 0.04})])
def test_a_run_is_that_of_the_script_from_the_same_base(script, flags, run, small_base, capsys):
    """Rewards are equal, and the other metrics are nearly equal. Without --beta, no kl is shown."""
    small = {name: SMALL[name] for name in SMALL if not name.startswith("base_")}
    theirs = run(method=script.__name__, **flags)
    assert (" kl " in capsys.readouterr().out) == ("beta" in flags)
    ours = theirs.parent / "ours"
    with at_work(ours.parent):
        script.main(arguments(small | flags | {
            "init_from": small_base, "output_dir": ours, "max_steps": 3}))
    names = ["loss", "grad_norm", "entropy", "accuracy", "completions/mean_length",
             "completions/clipped_ratio"]
    for one, other in zip(steps(ours), steps(theirs), strict=True):
        assert one["reward"] == other["reward"]
        assert other["sampling/sampling_logp_difference/mean"] < 1e-4   # before the first update
        for name in [*names, "kl"] if script is grpo else names:
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=2e-4), name
    assert read_summary(ours)["trained"]["greedy"] == read_summary(theirs)["trained"]["greedy"]


def test_a_correction_takes_the_trainers_log_probs_and_weighs_tokens(run, monkeypatch, capsys):
    plain = steps(run("plain", max_steps=1))[0]
    monkeypatch.setattr(pretrained, "check_sampler", lambda *_: None)
    add = calls.Completion.add                          # patched to find tokens less likely
    monkeypatch.setattr(calls.Completion, "add", lambda one, token, logp, entropy: (
        add(one, token, logp - 0.5, entropy)))
    right, capped = (steps(run(name, max_steps=1, importance_sampling_correction="truncate",
                               importance_sampling_cap=cap))[0]
                     for name, cap in (("right", 2.0), ("capped", 1.2)))
    for found, weight in ((right, math.exp(0.5)), (capped, 1.2)):
        assert found["sampling/sampling_logp_difference/mean"] == pytest.approx(0.5, abs=1e-4)
        assert found["max_log_ratio"] < 1e-4
        assert found["sampling/importance_sampling_ratio/mean"] == pytest.approx(weight, rel=1e-4)
        assert found["grad_norm"] == pytest.approx(weight * plain["grad_norm"], rel=1e-3)
    assert "sampler and trainer differ by 0.5 nats per token" in capsys.readouterr().out
    found |= {"signal": 1, "sampling/sampling_logp_difference/mean": 0.05}
    for dtype, count in (("float32", 1), ("bfloat16", 0)):
        assert len(list(warnings(found, SimpleNamespace(dtype=dtype)))) == count


# ---- sampler and trainer ---------------------------------------------------------------------

@pytest.fixture(scope="module")
def random_llama(tmp_path_factory):
    """The folder of a model with random weights, so that many different tokens are likely."""
    return save_random(tmp_path_factory.mktemp("random") / "model")


def sample(folder, prompts=PROMPTS, **flags):
    """Complete each prompt four times, and score the samples. -> Batch, log-probs (B, T), entropies
    (B, T)"""
    cfg = config_of(**({"max_completion_length": 24} | flags))
    policy = pretrained.Policy(folder, cfg)
    generator = torch.Generator().manual_seed(0)
    batch = pretrained.complete(policy, None, cfg, problems_of(prompts, 4), generator)
    with torch.no_grad():
        logps, entropy = pretrained.score(policy, batch.prompts, batch.tokens, cfg.temperature)
    return batch, logps * batch.mask, entropy * batch.mask


@pytest.mark.parametrize("family, is_recorded", [
    *((family, False) for family in FAMILIES), ("gemma2", True), ("gpt2", True)])
def test_the_trainer_says_what_the_sampler_said_of_prompts_of_mixed_length(
        family, is_recorded, tmp_path, monkeypatch, record_real):
    """This includes GPT-2, which would apply dropout in training. A recorded sampler says minus the
    log-probability of a token instead of the entropy."""
    folder = save_random(tmp_path / "model", family)
    if is_recorded:
        for name in ("W", "T", "TEMPERATURE", "DEVICE"):
            monkeypatch.setattr(real, name, None)       # so that they are restored
        record_real()
        monkeypatch.setattr(sampler, "generate", sampler.generate_recorded)
    batch, logps, entropy = sample(folder, temperature=0.8)
    assert batch.lengths.max() > 5 and batch.logps.std() > 0.5   # neither short nor certain
    torch.testing.assert_close(logps, batch.logps, rtol=0, atol=1e-5)
    entropy = -logps if is_recorded else entropy
    torch.testing.assert_close(entropy, batch.entropy, rtol=0, atol=1e-4)
    batch, logps, _ = sample(folder, dtype="bfloat16")          # recorded: of a rounded copy
    assert (logps - batch.logps).abs().sum() / batch.mask.sum() < 0.01 * (1 + is_recorded)


def test_what_has_a_fixed_place_on_cuda_is_recorded_and_computed_in_bfloat16():
    def can_record(family="llama", device="cuda", call_tokens=()):
        config = transformers.AutoConfig.for_model(family)
        policy = SimpleNamespace(model=SimpleNamespace(config=config),
                                 cfg=SimpleNamespace(device=device))
        return sampler.can_record(policy, [SimpleNamespace(calls=call_tokens)])
    assert can_record() and can_record("gemma3_text")
    dtypes = {device: config_of(device=device).dtype for device in ("cpu", "cuda")}
    assert dtypes == {"cpu": "float32", "cuda": "bfloat16"}
    assert not (can_record("falcon_h1") or can_record(device="cpu"))
    assert not can_record(call_tokens=("=",))


@pytest.mark.parametrize("family, words", [
    ("recurrent_gemma", "depends on padding: log-probabilities differ by "),
    ("minimax", "cannot be run: ")])
def test_a_family_that_cannot_be_trained_ends_the_run_before_its_first_step(
        family, words, tmp_path):
    reason = attempt(family, tmp_path)
    assert reason.startswith(f"--model {family}: ") and words in reason
    assert reason.endswith("choose a model of a family that docs/real-models.md lists")


class FakeEngine:
    """Samples with transformers from a copy of the weights; `sync` names how it gets updates."""

    def __init__(self, policy, sync):
        self.policy = copy.copy(policy)
        self.policy.model = copy.deepcopy(policy.model)
        self.sync = sync
        scale = {"nothing": 0.3, "greedy": 0.3, "nearly": 0.003}.get(sync, 0.0)
        torch.manual_seed(0)
        self.waiting = {name: weight + scale * torch.randn_like(weight)
                        for name, weight in policy.model.state_dict().items()}

    def update(self, model):
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        is_synced = self.sync in ("right", "greedy")
        self.policy.model.load_state_dict(weights if is_synced else self.waiting)
        self.waiting = weights if self.sync == "late" else self.waiting

    def complete(self, prompts, completions, T, temperature, seeds):
        if self.sync == "greedy" and not temperature:
            self.policy.model.load_state_dict(self.waiting)
        W = max(map(len, prompts))
        prompts = torch.tensor([[sampler.NO_TOKEN] * (W - len(row)) + row for row in prompts])
        uniforms = torch.stack([torch.rand(T, generator=torch.Generator().manual_seed(seed))
                                for seed in seeds[:, 0].tolist()])
        sampler.generate(self.policy, prompts, completions, self.policy.cfg,
                            uniforms if temperature else None)


@pytest.mark.parametrize("sync", ["right", "nothing", "nearly", "greedy", "late"])
def test_an_engine_with_other_weights_than_the_trainers_ends_the_run_or_warns(
        sync, small_llama, tmp_path, monkeypatch, capsys, stops):
    monkeypatch.setattr(pretrained, "load_engine", lambda policy, _: FakeEngine(policy, sync))
    flags = arguments(LIKE_SMALL | {"engine": "vllm", "model": small_llama, "max_steps": 2,
                                    "importance_sampling_correction": "none", "output_dir": "run"})
    with at_work(tmp_path):
        if sync in ("right", "late"):
            pretrained.main(flags)
            difference = steps(tmp_path / "run")[1]["sampling/sampling_logp_difference/mean"]
            is_warned = "warning: sampler and trainer differ" in capsys.readouterr().out
            assert (difference > 0.02) == is_warned == (sync == "late")
            return
        stops("does not sample from the trainer's weights", pretrained.main, flags, code=1)


@pytest.mark.parametrize("family, dtype, changes", [
    ("llama", "float32", {}), ("llama", "bfloat16", {}),
    ("gemma2", "float32", {"final_logit_softcapping": 2.0}), ("phi", "float32", {}),
    ("granite", "float32", {"logits_scaling": 3.0})])
def test_log_probs_of_a_few_positions_at_a_time_are_those_of_all(
        family, dtype, changes, tmp_path, monkeypatch, watch):
    """The gradients agree, too, also if they are added to others. Large logits are computed only
    for a model that scales them, or whose head has a bias. Positions and columns without a token
    are left out."""
    folder = save_random(tmp_path / "model", family, **changes)
    policy = pretrained.Policy(folder, config_of(temperature=0.8, dtype=dtype))
    prompts, tokens = torch.full((2, 3), 65), torch.randint(97, 123, (2, 14))
    tokens[0, 9:] = tokens[1, 6:] = sampler.NO_TOKEN

    def scored(with_entropy=True, has_place=False):
        policy.model.zero_grad(set_to_none=not has_place)
        logps, *entropy = pretrained.score(policy, prompts, tokens, 0.8, with_entropy=with_entropy)
        (logps * torch.arange(28).view(2, 14)).sum().backward()
        gradients = [weight.grad.clone() for weight in policy.model.parameters()]
        return [logps, *gradients, *entropy]
    whole = scored()
    assert whole[0].shape == (2, 14) and (whole[0] == 0).sum() == 5 + 8
    widths = []
    policy.model.register_forward_pre_hook(
        lambda model, args, inputs: widths.append(inputs["input_ids"].shape[1]), with_kwargs=True)
    monkeypatch.setattr(models.Head, "AT_ONCE", 4 * grpo.VOCAB_SIZE)
    sizes = watch(models.Few, "scored", lambda ctx, logits, tokens: len(tokens))
    for has_place in (False, True):
        for with_entropy in (True, False):
            for part, all_at_once in zip(scored(with_entropy, has_place), whole):
                error = 0.02 if dtype == "bfloat16" else 1e-6       # of sums of terms of this size
                scale = max(1, all_at_once.abs().max().item())
                torch.testing.assert_close(part, all_at_once, rtol=1e-4, atol=error * scale)
    assert set(widths) == {3, 3 + 9}                    # 3 to find out what the model does
    is_unknown = family in ("granite", "phi")
    if is_unknown:
        assert sizes == [2]
    else:
        assert sizes[1:] == 8 * [4, 4, 4, 3]            # forward and backward
    assert getattr(policy.model.config, "final_logit_softcapping", 2.0) == 2.0      # unchanged
    monkeypatch.setattr(models.Head, "AT_ONCE", policy.head.layer.weight.numel() - 1)
    is_large = policy.head.is_large(policy.model, torch.zeros(1, 1))        # the weight, not logits
    assert is_large != is_unknown


def test_each_prompt_is_read_once_and_rows_that_have_ended_are_dropped(random_llama):
    policy = pretrained.Policy(random_llama, config_of(max_completion_length=12))
    policy.ends = [*range(0, 320, 5)]
    sizes = []
    policy.model.register_forward_pre_hook(
        lambda model, args, inputs: sizes.append(len(inputs["input_ids"])), with_kwargs=True)
    batch = pretrained.complete(policy, None, policy.cfg, problems_of(PROMPTS, 4),
                                torch.Generator().manual_seed(0))
    continue_ = (batch.lengths[:, None] > torch.arange(1, 12)).sum(dim=0)
    assert 0 < continue_[5] < continue_[0] and sizes == [5, *continue_[continue_ > 0].tolist()]


def test_the_highest_and_the_lowest_random_number_draw_a_token_that_has_a_chance():
    generator = torch.Generator().manual_seed(0)
    end = 1.0
    while end >= 1 - 2**-22:                            # until probabilities sum to less than 1
        some = torch.randn(5_000, generator=generator)
        logits = torch.cat([some, torch.full((10,), -torch.inf)])[None]
        end = torch.log_softmax(logits, dim=1).exp().cumsum(dim=1)[0, -1].item()
    for uniform, x in ((1 - 2**-24, logits), (0.0, torch.tensor([[-torch.inf, 0.0, 0.0]]))):
        [token], *numbers = sampler.draw(x.clone(), 1.0, torch.tensor([uniform]))
        assert x[0, token] > -torch.inf and all(map(math.isfinite, numbers))


def test_prompts_stand_at_the_right_behind_their_instruction_or_in_the_chat_template(random_llama):
    """A tokenizer may put tokens around a text. The last one would end the prompt."""
    policy = pretrained.Policy(random_llama, config_of(instruction="Go "))
    template = processors.TemplateProcessing(single="<|pad|> $A <|eos|>", special_tokens=[
        ("<|pad|>", grpo.PAD), ("<|eos|>", grpo.EOS)])
    framing = policy.tokenizer.backend_tokenizer
    framing.post_processor, plain = template, framing.post_processor
    assert policy.token_ids("a") == [grpo.PAD, *b"Go a"]
    framing.post_processor = plain
    ids = policy.encode(problems_of(["abc", "a"]))
    assert ids.tolist() == [[*b"Go abc"], [sampler.NO_TOKEN] * 2 + [*b"Go a"]]
    policy.tokenizer.chat_template = TEMPLATE
    assert policy.encode(problems_of("x")).tolist() == [[grpo.PAD, *b"user:Go x!"]]
    policy.cfg = config_of(chat_template=False)
    assert policy.encode(problems_of("x")).tolist() == [[*b"x"]]


def test_a_plain_prompt_that_lacks_the_token_that_begins_texts_is_one_warning(random_llama, capsys):
    policy = pretrained.Policy(random_llama, config_of())
    for bos, instruction, number in (
            ("<|pad|>", "", 1), ("<|pad|>", "<|pad|>", 0), ("<|eos|>", "", 0)):
        policy.cfg, policy.is_warned = config_of(instruction=instruction), False
        policy.tokenizer.bos_token = bos                # GPT-2's also ends texts
        policy.encode(problems_of(PROMPTS))
        assert capsys.readouterr().out.count(f"--instruction '{bos}'\n") == number
    policy.tokenizer.bos_token, policy.tokenizer.chat_template = "<|pad|>", "{{ messages }}"
    policy.encode(problems_of(PROMPTS))
    assert not capsys.readouterr().out


TEMPLATE = ("{% for m in messages %}<|pad|>{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
            "{% if thinks %}?{% endif %}{% if add_generation_prompt %}!{% endif %}")


@pytest.mark.parametrize("end, opening, text, is_formed", [
    ("<think>\n", "<think>", "So</think><answer>a , b != c</answer>", True),
    ("<think>\n\n</think>\n\n", "<think>\n\n</think>", "<answer>a , b != c</answer>", True),
    ("<answer> ", "<answer>", "a , b != c</answer>", False),
    ("<think> and </think>", "", "<answer>a</answer>", False), ("<assistant>", "", "a", False)])
def test_a_completion_begins_with_the_tag_that_its_prompt_opens(
        end, opening, text, is_formed, random_llama, monkeypatch):
    """Functions of a --reward_file get it without, and no decoder may change its spaces."""
    policy = pretrained.Policy(random_llama, config_of(instruction=end))
    for suffix in ("", "_for_bpe_even_though_it_will_corrupt_output"):
        setattr(policy.tokenizer, f"clean_up_tokenization_spaces{suffix}", True)
    monkeypatch.setattr(sampler, "generate", lambda policy, prompts, completions, *_: [
        one.add(token) for one in completions for token in policy.tokenizer(text).input_ids])
    cfg = policy.cfg = dataclasses.replace(policy.cfg, max_completion_length=60)
    batch = pretrained.complete(policy, None, cfg, problems_of([""]))
    assert batch.texts == [opening + text]
    assert rewards.well_formed(None, None, batch.texts[0], 0, 0) == is_formed
    policy.cfg = dataclasses.replace(cfg, reward_file="x")
    assert pretrained.complete(policy, None, cfg, problems_of([""])).texts == [text]


def test_a_token_without_an_embedding_and_a_prompt_without_a_token_are_one_line(tmp_path, refused):
    folder = save_random(tmp_path / "model", vocab_size=grpo.EOS, pad_token_id=None,
                         eos_token_id=ord("!"))         # the tokenizer's EOS cannot be sampled
    policy = pretrained.Policy(folder, config_of())
    assert policy.ends == [ord("!")] and policy.token_ids("a") == [*b"a"]
    refused("its tokenizer has the token '<|eos|>', but the model has only 264 embeddings: ",
            policy.token_ids, "a<|eos|>")
    refused("the prompt '' has no token; ", policy.token_ids, "")


def test_conversations_have_a_system_prompt_of_their_own_or_of_the_flag(random_llama):
    policy = pretrained.Policy(random_llama, config_of(
        data="x", system_prompt="S", instruction="Go ", chat_template_kwargs='{"thinks": true}'))
    policy.tokenizer.chat_template = TEMPLATE
    user, system = {"role": "user", "content": "u"}, {"role": "system", "content": "own"}
    for prompt, text in ((json.dumps([user, system | {"role": "assistant"}, user]),
                          "|system:S|user:u|assistant:own|user:Go u?!"),
                         (json.dumps([system, user]), "|system:own|user:Go u?!"),
                         ("x", "|system:S|user:Go x?!"), ("[{}]", "|system:S|user:Go [{}]?!")):
        expected = [grpo.PAD if letter == "|" else ord(letter) for letter in text]
        assert policy.token_ids(prompt) == expected
    policy.cfg = config_of()                            # a task's prompt is not a conversation
    text = json.dumps([user])
    assert bytes(policy.token_ids(text)[1:]) == f"user:{text}!".encode()


@pytest.mark.parametrize("template, flags, words", [
    ("{{ raise_exception('no  system') }}", {}, "its chat template fails, try --no-chat_template: "
     "no system\n"), ("{% for %}", {}, "its chat template fails"),
    (None, {"thinks": 1}, "need a chat template: none has none")], ids=str)
def test_a_chat_template_that_fails_or_lacks_what_is_given_is_one_line(
        template, flags, words, random_llama, refused):
    policy = pretrained.Policy(random_llama, config_of(
        data="x", chat_template_kwargs=json.dumps(flags)))
    policy.tokenizer.chat_template = template
    refused(words, policy.token_ids, "x")
    if template is None:
        policy.cfg = config_of(data="x")
        chat = [{"role": "user", "content": ""}]
        refused("conversations in --data need", policy.token_ids, json.dumps(chat))


# ---- checkpoints -----------------------------------------------------------------------------

@pytest.mark.parametrize("flags", [
    {"beta": 0.05, "num_iterations": 2, "num_mini_batches": 2, "save_steps": 2},
    {"method": "gspo", "importance_sampling_correction": "truncate", "dtype": "bfloat16",
     "gradient_checkpointing": True}], ids=["grpo", "gspo"])
def test_four_steps_equal_two_and_two_after_a_resume_bit_for_bit(flags, run):
    torch.manual_seed(1)
    four = run("four", max_steps=4, **flags)
    torch.manual_seed(2)
    two = run("two", max_steps=2, **flags)
    resume(two)                                         # a finished run stays unchanged
    resume(two, max_steps=4)
    assert not difference(outcome(two), outcome(four))


@pytest.mark.parametrize("schedule, rates", [
    ("constant", [0.5, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 2 / 3, 1 / 3]),
    ("cosine", [0.5, 1, 1, 0.75, 0.25])])
def test_the_rates_of_a_schedule_rise_and_fall(schedule, rates):
    cfg = config_of(max_steps=5, lr_scheduler_type=schedule, warmup_steps=2, learning_rate=1.0)
    assert [pretrained.learning_rate(cfg, step) for step in range(5)] == pytest.approx(rates)


def test_the_learning_rate_is_that_of_its_step(run):
    """A step of the schedule equals a step of AdamW at this rate. --max_grad_norm 0 is no limit."""
    slow, plain = (run(name, max_steps=1, **flags) for name, flags in (
        ("slow", {"warmup_steps": 2, "max_grad_norm": 0.0}),
        ("plain", {"learning_rate": 2.5e-4, "max_grad_norm": 1e9})))
    weights = [models.load_model(folder / "checkpoint-1").state_dict()
               for folder in (slow, plain)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@pytest.mark.parametrize("owner, name, is_moment", [
    (processes.Run, "save", lambda *_, **__: True),
    (processes.os, "replace", lambda _, path: "checkpoint-2" in str(path)),
    (plumbing.Run, "save", lambda run: run.step == 2),
    (processes.shutil, "rmtree", lambda path, ignore_errors=False: not ignore_errors)],
    ids=["first", "weights", "state", "removal"])
def test_a_kill_while_a_checkpoint_is_written_leaves_a_run_that_goes_on(
        owner, name, is_moment, run, whole, tmp_path, monkeypatch):
    plain = getattr(owner, name)

    def mortal(*args, **options):
        if is_moment(*args, **options):
            raise KeyboardInterrupt
        return plain(*args, **options)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, mortal)
        run(**TWO)
    resume(tmp_path / "run")
    assert not difference(outcome(tmp_path / "run"), outcome(whole))


def test_sigterm_saves_the_step_and_only_checkpoints_of_the_run_are_removed(
        run, whole, tmp_path, monkeypatch):
    update = pretrained.update
    folder = tmp_path / "run/checkpoint-0-best"
    archive = tmp_path / "run/checkpoint-0.zip"

    def stopped(*args):
        folder.mkdir()
        archive.touch()
        signal.raise_signal(signal.SIGTERM)
        return update(*args)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(pretrained, "update", stopped)
        run(**TWO | {"save_steps": 2})
    assert ended.value.code == 143 and len(steps(tmp_path / "run")) == 1
    resume(tmp_path / "run")
    folder.rmdir()
    archive.unlink()
    assert not difference(outcome(tmp_path / "run"), outcome(whole))


def test_a_resumed_run_needs_its_files_unchanged_but_they_may_move(
        small_llama, tmp_path, refused):
    flags = {name: value for name, value in LIKE_SMALL.items() if name != "task"}
    data = tmp_path / "data.jsonl"
    rows = [json.dumps({"prompt": f"{i}+1=", "answer": i + 1}) for i in range(90)]
    data.write_text("\n".join(rows))
    reward = tmp_path / "mine.py"
    reward.write_text("def reward(completions, **columns): return [0.5] * len(completions)\n")
    with at_work(tmp_path):
        pretrained.main(arguments(flags | {
            "model": small_llama, "data": data, "reward_file": reward, "max_steps": 1,
            "output_dir": "run"}))
    moved = reward.rename(tmp_path / "yours.py"), data.rename(tmp_path / "moved.jsonl")
    files = dict(zip(("reward_file", "data"), moved))
    resume(tmp_path / "run", max_steps=2, **files)
    for line in lines(tmp_path / "run/evaluation.jsonl"):
        assert line["base"]["prompt"] == line["trained"]["prompt"]
    for flag, path in files.items():
        with open(path, "a") as file:
            file.write("\n")
        refused(f"--{flag} {path}: differs from the file that this run began with; put that back, "
                f"or begin a new run from this one's model: --model {tmp_path / 'run'}",
                resume, tmp_path / "run", max_steps=3, **files)
        path.write_text(path.read_text()[:-1])


def test_without_torchrun_there_is_one_process_whatever_the_environment_has(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
        found = runpy.run_path(processes.__file__)
        assert (found["RANK"], found["WORLD_SIZE"]) == (0, 1)


def test_another_run_can_start_from_the_last_checkpoint_of_a_run(run, whole):
    [path] = whole.glob("checkpoint-*")
    second = run(model=whole, max_steps=0)
    assert read_summary(second)["base"] == read_summary(whole)["trained"]
    _, flags = plumbing.read_config(second)
    assert flags["model"] == str(path)                  # although the first run may continue
    assert not list(second.glob("checkpoint-*"))
    resume(second, max_steps=1)                         # it has no checkpoint, so it starts again
    assert len(steps(second)) == 1


def test_a_checkpoint_has_the_dropout_and_the_generation_config_of_its_model(run, tmp_path):
    """transformers 5.0 and 5.19 do not save such a generation config, which does not sample."""
    folder = save_random(tmp_path / "model", "falcon")
    strange = json.dumps({"temperature": 0.7, "top_k": 20, "eos_token_id": grpo.EOS})
    (folder / "generation_config.json").write_text(strange)
    found = run(model=folder, max_steps=1) / "checkpoint-1/generation_config.json"
    assert found.read_text() == strange
    assert json.loads(found.with_name("config.json").read_text())["hidden_dropout"] == 0.3
    (folder / "generation_config.json").unlink()
    found = run("second", model=folder, max_steps=1) / "checkpoint-1/generation_config.json"
    assert not found.exists()


def test_what_cannot_be_saved_ends_the_run_before_its_first_step(run, tmp_path, monkeypatch, stops):
    def fail(*_):
        raise ValueError("no\nway")
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", fail)
    stops("/checkpoint-trial.tmp: cannot be written: no way", run)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.json", "train.py", "run.lock"}


def test_only_a_run_of_all_weights_resumes_without_the_model_that_it_began_with(
        run, small_llama, tmp_path, refused):
    model = shutil.copytree(small_llama, tmp_path / "model")
    half = run("half", model=model, max_steps=2)
    other = run("other", model=model, max_steps=2, beta=0.05)
    adapter = run("adapter", model=model, max_steps=2, lora_rank=4)
    plain = run("plain", max_steps=3)
    shutil.rmtree(model)
    resume(half, max_steps=3)
    assert not difference(outcome(half), outcome(plain))
    for folder in (other, adapter):                     # --beta and adapters need the model
        refused(f"the folder {model} is gone", resume, folder, max_steps=3)


# ---- adapters --------------------------------------------------------------------------------

LORA = {"lora_rank": 4, "learning_rate": 5e-3, "beta": 0.05, "max_steps": 4}


@pytest.fixture(scope="module")
def lora_run(small_llama, tmp_path_factory):
    """The folder of a LoRA run of four steps."""
    return run_in(tmp_path_factory.mktemp("lora"), small_llama, **LORA)


def test_without_its_adapter_the_policy_is_the_reference_and_frozen_weights_may_be_bfloat16(
        small_llama):
    """Autocast rounds them to bfloat16 anyway, before each product."""
    def score(policy):
        return pretrained.score_all(policy, batch.prompts, batch.tokens)[0]
    policy = pretrained.Policy(small_llama, config_of(lora_rank=4))
    for name, weight in policy.model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.1)
    batch = pretrained.complete(policy, None, policy.cfg, problems_of(["(3+4)=", "(3-4)="]))
    base = score(pretrained.Policy(small_llama, config_of()))
    before = score(policy)
    with models.without_adapter(policy.model):
        assert torch.equal(score(policy), base)
    assert torch.equal(score(policy), before) and not torch.allclose(before, base, atol=1e-3)
    half = pretrained.Policy(small_llama, config_of(lora_rank=4, dtype="bfloat16"))
    half.model.load_state_dict(policy.model.state_dict())
    policy.autocast = half.autocast
    layers = [layer for layer in half.model.modules() if hasattr(layer, "base_layer")]
    assert layers and {layer.base_layer.weight.dtype for layer in layers} == {torch.bfloat16}
    assert torch.equal(score(half), score(policy))


def test_a_checkpoint_is_the_adapter_from_which_runs_go_on(run, lora_run):
    names = {path.name for path in lora_run.glob("checkpoint-4/*")}
    assert "adapter_model.safetensors" in names and "model.safetensors" not in names
    assert steps(lora_run)[-1]["kl"] != 0
    half = run(**LORA | {"max_steps": 2})
    resume(half, max_steps=4)
    assert not difference(outcome(half), outcome(lora_run))
    for line in lines(lora_run / "evaluation.jsonl")[:4]:
        assert ask.answer(lora_run, line["prompt"]) == line["trained"]["text"]
    runs = [lora_run]                                   # adapters trained on top of adapters
    for name, rank in (("first", 4), ("second", 4), ("third", 0)):
        runs.append(run(name, **LORA | {"model": runs[-1], "lora_rank": rank, "max_steps": 1}))
    scores = [read_summary(folder) for folder in runs]
    assert [found["base"] for found in scores[1:]] == [found["trained"] for found in scores[:3]]


def test_an_adapter_has_the_size_of_its_flags_and_is_added_to_all_matrices(run):
    folder = run(lora_rank=4, lora_alpha=8, max_steps=1)
    saved = json.loads((folder / "checkpoint-1/adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"]) == (4, 8)
    names = {name.split(".")[-3] for name in load_file(folder / "checkpoint-1" / models.ADAPTER)}
    assert names == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}


def test_an_adapter_of_another_model_is_refused_in_one_line(lora_run, tmp_path, refused):
    folder = shutil.copytree(next(lora_run.glob("checkpoint-*")), tmp_path / "adapter")
    found = load_file(folder / models.ADAPTER)
    deeper = {name.replace("layers.0", "layers.7"): found[name].clone() for name in found}
    save_file(deeper | found, folder / models.ADAPTER)
    refused(f"--model {folder}: cannot be loaded: ", pretrained.Policy, folder, config_of())


# ---- refused flags and files -----------------------------------------------------------------

@pytest.mark.parametrize("flags, words", [
    ({"model": "nowhere"}, "--model nowhere: is not a folder here, and as a "),
    ({"model": "BASE"}, ": is a run of a script; "),
    ({"engine": "vllm", "sample_batch_size": 8}, "--sample_batch_size: needs --engine tra"),
    ({"reward_file": "x.py", "reward": "format"}, "--reward: cannot be used with --reward_file"),
    ({"importance_sampling_cap": 0.0}, "--importance_sampling_cap: must be above"),
    ({"chat_template_kwargs": "[1]"}, "--chat_template_kwargs [1]: is not a JSON object"),
    ({"data": "x"}, "--task: cannot be used with --data"),
    ({"max_completion_length": 2047}, "model reads 2048 in all; lower it, or")], ids=str)
def test_what_cannot_work_is_refused_in_one_line(
        flags, words, run, small_base, refused):
    if "BASE" in flags.values():
        flags = {"model": small_base}
    refused(words, run, **flags)


def test_a_gguf_file_and_its_folder_are_refused_with_advice(refused, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "m.gguf"):
        refused(f"from_pretrained('{tmp_path}', gguf_file='m.gguf') of", models.load, path)


@pytest.mark.parametrize("changes, words", [
    ({"quantization_config": {"quant_method": "unheard of"}},
     "its weights are quantized, so only an adapter can be trained: add --lora_rank 8, or"),
    ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}},
     "cannot be loaded: it needs code of its own, which is not run here; choose another model"),
    ({}, "cannot be loaded: it lacks model.layers.1.mlp.up_proj.weight")])
def test_quantized_or_missing_weights_and_code_of_a_model_s_own_are_refused(
        changes, words, run, refused, tmp_path):
    path = save_random(tmp_path / "model") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    if not changes:
        weights = load_file(path.with_name("model.safetensors"))
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, path.with_name("model.safetensors"), metadata={"format": "pt"})
    refused(words, run, model=path.parent)
