"""In examples/pretrained.py sampler and trainer agree, for models of any family and prompts of any
length, and a completion is a function of its prompt and its random numbers."""
import json

import pytest
import torch
from small_models import FAMILIES, NEEDS, config_of, load_example, save_random

import common
import grpo

transformers = pytest.importorskip("transformers", reason=NEEDS)
pretrained = load_example()
PROMPTS = ["(3+4)=", "3>", "((((3+4)-5)*4)-2)=", "12", "Say yes:"]
T = 24


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(family): random weights, so that different tokens are likely."""
    made = {}

    def make(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family) / "model"
            made[family] = save_random(folder, family)
        return made[family]
    return make


def sample(folder, prompts=PROMPTS, G=4, **flags):
    """Complete each prompt G times, and score what was sampled. -> policy, Rollout, (B, T)"""
    cfg = config_of(max_completion_length=T, **flags)
    policy = pretrained.Policy(folder, cfg)
    problems = [common.Problem(text, "") for text in prompts for _ in range(G)]
    uniforms = torch.rand(len(problems), T, generator=torch.Generator().manual_seed(0))
    ids, out, _, _ = pretrained.rollout(policy, problems, cfg, uniforms)
    with torch.no_grad():
        logps, entropy = pretrained.score(policy, ids, out.tokens, cfg.temperature)
    return out, logps * out.mask, entropy * out.mask


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_says_what_the_sampler_said_of_prompts_of_mixed_length(family, folder_of):
    out, logps, entropy = sample(folder_of(family), temperature=0.8)
    assert out.lengths.max() > 5 and out.logps.std() > 0.5       # neither short nor certain
    assert len(set(map(tuple, out.tokens.tolist()))) > 10
    torch.testing.assert_close(logps, out.logps, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, out.entropy, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_they_are_near(family, folder_of):
    out, logps, _ = sample(folder_of(family), dtype="bfloat16")
    assert (logps - out.logps).abs().sum() / out.mask.sum() < 0.01
    policy = pretrained.Policy(folder_of(family), config_of(dtype="bfloat16"))
    assert {weight.dtype for weight in policy.model.parameters()} == {torch.float32}
    exact = pretrained.Policy(folder_of(family), config_of())
    ids = policy.encode(PROMPTS)
    tokens = out.tokens[::4]
    with torch.no_grad():
        rounded, _ = pretrained.score(policy, ids, tokens)
        precise, _ = pretrained.score(exact, ids, tokens)
    assert 1e-4 < (rounded - precise).abs().mean() < 0.1            # it is another arithmetic


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_may_ask_for_another_way_to_sample_and_is_not_heard(family, folder_of, tmp_path):
    other = save_random(tmp_path / "model", family)
    asked = {"do_sample": True, "top_p": 0.5, "top_k": 5, "repetition_penalty": 1.5,
             "temperature": 0.3, "eos_token_id": [ord("]"), ord("}")], "pad_token_id": grpo.PAD,
             "min_new_tokens": 3, "no_repeat_ngram_size": 2, "suppress_tokens": [50, 51]}
    (other / "generation_config.json").write_text(json.dumps(asked))
    out, logps, _ = sample(other)
    torch.testing.assert_close(logps, out.logps, rtol=0, atol=1e-5)
    plain, _, _ = sample(folder_of(family))
    long = out.lengths == plain.lengths                         # ] and } end a completion here
    assert torch.equal(out.tokens[long] * out.mask[long], plain.tokens[long] * out.mask[long])
    assert (out.lengths <= plain.lengths).all()
    policy = pretrained.Policy(other, config_of())
    assert policy.ends == [ord("]"), ord("}"), grpo.EOS]        # the tokenizer's, too
    assert policy.generation_config.top_p == 0.5                # for its checkpoints


def test_a_weights_file_in_bfloat16_is_trained_in_float32(tmp_path, folder_of):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder_of("llama"), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    pretrained_tokenizer = transformers.AutoTokenizer.from_pretrained(folder_of("llama"))
    pretrained_tokenizer.save_pretrained(tmp_path / "model")
    policy = pretrained.Policy(tmp_path / "model", config_of())
    assert {weight.dtype for weight in policy.model.parameters()} == {torch.float32}


# ---- what a completion depends on ------------------------------------------------------------

@pytest.mark.parametrize("flags", [{"sample_batch_size": 3}, {"sample_batch_size": 1}], ids=repr)
def test_a_completion_does_not_depend_on_those_beside_it(flags, folder_of):
    together, _, _ = sample(folder_of("llama"))
    torch.manual_seed(5)
    parts, _, _ = sample(folder_of("llama"), **flags)
    assert torch.equal(together.tokens * together.mask, parts.tokens * parts.mask)
    torch.testing.assert_close(together.logps, parts.logps, rtol=0, atol=1e-5)
    last, _, _ = sample(folder_of("llama"), PROMPTS[:2])
    rows = together.mask[:8]
    assert torch.equal(together.tokens[:8] * rows, last.tokens * rows)


def test_tokens_are_as_frequent_as_they_are_likely():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]]).repeat(20_000, 1)
    uniforms = torch.rand(20_000, 1, generator=torch.Generator().manual_seed(0))
    draw = pretrained.Draw(uniforms, temperature=2.0)
    left = draw(None, logits)
    tokens = left.argmax(dim=1)
    assert (left == 0).sum() == 20_000 and left.isneginf().sum() == 3 * 20_000
    shares = torch.bincount(tokens, minlength=4) / 20_000
    p = torch.softmax(logits[0] / 2, dim=0)
    torch.testing.assert_close(shares, p, atol=0.01, rtol=0)
    torch.testing.assert_close(draw.logps[0][:, 0], p.log()[tokens])
    entropy = -(p * p.log().clamp(min=-99)).sum()
    torch.testing.assert_close(draw.entropies[0][0, 0], entropy)


def test_each_token_has_a_random_number_of_its_own():
    uniforms = torch.tensor([[0.1, 0.6, 0.9], [0.6, 0.1, 0.4]])
    draw = pretrained.Draw(uniforms, temperature=1.0)
    tokens = [draw(None, torch.zeros(2, 2)).argmax(dim=1).tolist() for _ in range(3)]
    assert tokens == [[0, 1], [1, 0], [1, 0]]


def test_the_highest_and_the_lowest_random_number_draw_a_token_that_has_a_chance():
    generator = torch.Generator().manual_seed(0)
    ends = [1.0]
    while ends[-1] >= 1 - 2**-22:                       # until chances add up to less than 1
        some = torch.randn(5_000, generator=generator)
        logits = torch.cat([some, torch.full((10,), -torch.inf)])[None]
        ends.append(torch.log_softmax(logits, dim=1).exp().cumsum(dim=1)[0, -1].item())
    draw = pretrained.Draw(torch.tensor([[1 - 2**-24]]), temperature=1.0)
    assert draw(None, logits).argmax() < 5_000
    assert torch.isfinite(draw.logps[0]).all()
    zero = pretrained.Draw(torch.tensor([[0.0]]), temperature=1.0)
    zero(None, torch.tensor([[-torch.inf, 0.0, 0.0]]))
    assert torch.isfinite(zero.logps[0]).all()          # not the first, which has no chance


def test_without_random_numbers_the_likeliest_token_is_taken(folder_of):
    cfg = config_of(max_completion_length=T)
    policy = pretrained.Policy(folder_of("llama"), cfg)
    ids = policy.encode(PROMPTS[:1])
    tokens, _, _ = pretrained.complete(policy, ids, cfg)
    for t in range(4):
        with torch.no_grad():
            logits = policy.model(torch.cat([ids, tokens[:, :t]], dim=1)).logits[0, -1]
        assert logits.argmax() == tokens[0, t]


# ---- prompts and ends ------------------------------------------------------------------------

def test_shorter_prompts_stand_at_the_right_behind_no_token(folder_of):
    policy = pretrained.Policy(folder_of("llama"), config_of(instruction="Go "))
    ids = policy.encode(["abc", "a"])
    assert ids.tolist() == [[71, 111, 32, 97, 98, 99],
                            [pretrained.NO_TOKEN] * 2 + [71, 111, 32, 97]]


def test_a_chat_template_is_used_if_there_is_one_and_adds_the_only_special_tokens(tmp_path):
    folder = save_random(tmp_path / "model")
    policy = pretrained.Policy(folder, config_of())
    policy.tokenizer.chat_template = (
        "{% for m in messages %}<|pad|>{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}!{% endif %}")
    called = []
    plain = type(policy.tokenizer).__call__

    def spy(self, text, **options):
        called.append(options)
        return plain(self, text, **options)
    policy.tokenizer.__class__ = type("Spy", (type(policy.tokenizer),), {"__call__": spy})
    [row] = policy.encode(["hi"]).tolist()
    assert row == [grpo.PAD, *b"user:hi!"]
    plain_policy = pretrained.Policy(folder, config_of(chat_template=False))
    plain_policy.tokenizer = policy.tokenizer
    assert plain_policy.encode(["hi"]).tolist() == [[*b"hi"]]
    policy.tokenizer.chat_template = None
    policy.encode(["hi"])
    assert [options["add_special_tokens"] for options in called] == [False, True, True]


def test_a_completion_ends_with_its_first_end_which_its_text_lacks(folder_of):
    cfg = config_of(max_completion_length=6)
    policy = pretrained.Policy(folder_of("llama"), cfg)
    policy.ends = [ord("."), grpo.EOS]
    rows = torch.tensor([[*b"ab.cd."], [*b"abcdef"], [ord("a"), grpo.EOS, *b".bcd"]])

    def engine(policy, prompts, cfg, uniforms):
        return rows, torch.ones(3, 6), torch.ones(3, 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "complete", engine)
        problems = [common.Problem("x", "")] * 3
        _, out, texts, is_truncated = pretrained.rollout(policy, problems, cfg)
    assert out.lengths.tolist() == [3, 6, 2]
    assert out.mask.sum(dim=1).tolist() == [3, 6, 2]
    assert torch.equal(out.logps, out.mask) and torch.equal(out.entropy, out.mask)
    assert texts == ["ab", "abcdef", "a"]
    assert is_truncated.tolist() == [False, True, False]


def test_dropout_is_off_while_a_model_trains(folder_of):
    policy = pretrained.Policy(folder_of("gpt2"), config_of(gradient_checkpointing=True))
    assert policy.model.training
    ids = policy.encode(PROMPTS)
    tokens = torch.randint(0, 256, (len(ids), 5))
    one, _ = pretrained.score(policy, ids, tokens)
    other, _ = pretrained.score(policy, ids, tokens)
    assert torch.equal(one, other)


def test_a_model_that_samples_is_in_training_again_afterwards(folder_of):
    cfg = config_of(max_completion_length=2)
    policy = pretrained.Policy(folder_of("llama"), cfg)
    pretrained.complete(policy, policy.encode(["a"]), cfg)
    assert policy.model.training


# ---- memory ----------------------------------------------------------------------------------

def test_checkpointed_activations_are_computed_twice_and_the_gradient_stays(folder_of):
    gradients = []
    calls = []
    for is_checkpointed in (False, True):
        policy = pretrained.Policy(
            folder_of("llama"), config_of(gradient_checkpointing=is_checkpointed))
        count = []
        first_layer = policy.model.model.layers[0]
        first_layer.self_attn.register_forward_hook(lambda *_: count.append(1))     # noqa: B023
        logps, _ = pretrained.score(policy, policy.encode(PROMPTS), torch.randint(
            0, 256, (5, 7), generator=torch.Generator().manual_seed(0)))
        logps.sum().backward()
        gradients.append([weight.grad for weight in policy.model.parameters()])
        calls.append(len(count))
    assert calls == [1, 2]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_a_part_of_a_batch_is_no_wider_than_its_longest_prompt(folder_of, monkeypatch):
    policy = pretrained.Policy(folder_of("llama"), config_of())
    ids = policy.encode(PROMPTS)
    tokens = torch.randint(0, 256, (5, 3), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together, _ = pretrained.score(policy, ids, tokens)
        widths = []
        policy.model.model.embed_tokens.register_forward_hook(
            lambda module, x, y: widths.append(y.shape[1]))
        alone, _ = pretrained.score(policy, ids[1:2], tokens[1:2])
    assert widths == [len(PROMPTS[1]) + 3]
    torch.testing.assert_close(alone, together[1:2], rtol=0, atol=1e-5)


def test_logits_are_computed_for_completions_alone(folder_of, monkeypatch):
    policy = pretrained.Policy(folder_of("llama"), config_of())
    seen = []
    plain = grpo.logprobs
    monkeypatch.setattr(grpo, "logprobs", lambda logits, *rest: (
        seen.append(logits.shape), plain(logits, *rest))[1])
    lengths = []
    policy.model.lm_head.register_forward_hook(lambda module, x, y: lengths.append(y.shape[1]))
    pretrained.score(policy, policy.encode(PROMPTS), torch.zeros(5, 3, dtype=torch.long))
    assert seen == [(5, 3, grpo.VOCAB_SIZE)]
    assert lengths == [4]
