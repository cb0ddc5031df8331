"""Generation through the stages of a pipeline, with keys and values kept by each."""

import pytest
import torch
import torch.distributed as dist
from mt_pipeline import Executor, StageError, TensorSpec
from mt_schedule import make_schedule, split_layers
from torch import nn

WIDTH, VOCABULARY, LAYERS = 8, 13, 5


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x, past):
        """Attend to the past and to x; return the past for the next step too."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        new, total = q.shape[1], k.shape[1]
        mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + y, (k, v)


def make_model():
    torch.manual_seed(2)
    return (
        torch.randn(VOCABULARY, WIDTH).double(),
        [Attention().double() for _ in range(LAYERS)],
    )


class Stage:
    """Some layers, and what each request has cached in them."""

    def __init__(self, numbers, *, first, last):
        self.table, layers = make_model()
        self.layers = [layers[i] for i in numbers]
        self.first, self.last = first, last
        self.cache = {}

    def __call__(self, x, step):
        h = self.table[step["tokens"]] if self.first else x
        past = self.cache.get(step["request"], [None] * len(self.layers))
        kept = []
        for layer, before in zip(self.layers, past, strict=True):
            h, after = layer(h, before)
            kept.append(after)
        self.cache[step["request"]] = kept
        return h[:, -1] @ self.table.t() if self.last else h


def prompts():
    torch.manual_seed(4)
    return {
        "a": torch.randint(VOCABULARY, (2, 4)),
        "b": torch.randint(VOCABULARY, (1, 7)),
        "c": torch.randint(VOCABULARY, (3, 2)),
    }


def generate(step, tokens, new):
    """Greedy decoding of several requests; `step` gives the logits of all of them."""
    fed = dict(tokens)
    for _ in range(new):
        logits = step([{"request": name, "tokens": t} for name, t in fed.items()])
        fed = {name: each.argmax(-1, keepdim=True) for name, each in zip(fed, logits, strict=True)}
        tokens = {name: torch.cat([t, fed[name]], 1) for name, t in tokens.items()}
    return tokens


def expected(new):
    """Each request alone, the whole sequence anew for every token."""
    result = {}
    for name, tokens in prompts().items():
        for _ in range(new):
            stage = Stage(range(LAYERS), first=True, last=True)
            logits = stage(None, {"request": name, "tokens": tokens})
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
        result[name] = tokens
    return result


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_cached_generation_equals_one_process_without_a_cache(ranks, world, chunks):
    def body():
        name = "1f1b" if chunks == 1 else "interleaved"
        options = {} if chunks == 1 else {"chunks": chunks}
        schedule = make_schedule(name, stages=world, microbatches=2, **options)
        rank = dist.get_rank()
        parts = split_layers(LAYERS, schedule.stages)
        stages = [
            Stage(parts[stage], first=stage == 0, last=stage == schedule.stages - 1)
            for stage in schedule.stages_of(rank)
        ]
        executor = Executor(
            schedule,
            stages if len(stages) > 1 else stages[0],
            group=dist.group.WORLD if world > 1 else None,
            activation=lambda step: TensorSpec((*step["tokens"].shape, WIDTH), torch.float64),
        )
        return generate(
            lambda steps: executor.infer(
                steps,
                output=lambda step: TensorSpec((len(step["tokens"]), VOCABULARY), torch.float64),
            ),
            prompts(),
            new=6,
        )

    wanted = expected(6)
    for result in ranks(world, body):
        assert result.keys() == wanted.keys()
        assert all(torch.equal(result[name], wanted[name]) for name in wanted)


def test_an_output_that_is_not_as_said_is_refused_on_all_ranks(ranks):
    def body():
        executor = Executor(
            make_schedule("1f1b", stages=2, microbatches=1),
            lambda x, batch: batch * 1.0,
            group=dist.group.WORLD,
            activation=lambda batch: TensorSpec(tuple(batch.shape), batch.dtype),
        )
        with pytest.raises(StageError) as caught:
            executor.infer([torch.ones(2)], output=lambda _: TensorSpec((3,), torch.float32))
        assert executor.infer([], output=lambda _: TensorSpec((3,), torch.float32)) == []
        return str(caught.value)

    assert set(ranks(2, body)) == {
        "stage 1 on pipeline rank 1 failed in the forward of micro-batch 0: ValueError: the stage "
        "returned (2,) float32, but output() says (3,) float32"
    }


def test_outputs_that_are_views_arrive_as_they_are(ranks):
    views = {
        "a slice": lambda y: y[:, -1],
        "transposed": lambda y: y[0].t(),
        "expanded": lambda y: y[:1].expand(3, -1, -1),
    }

    def body():
        group = dist.group.WORLD
        batch = torch.arange(24, dtype=torch.float64).view(2, 3, 4)
        for name, view in views.items():
            executor = Executor(
                make_schedule("1f1b", stages=2, microbatches=2),
                lambda x, batch, view=view: batch * 2 if x is None else view(x),
                group=group,
                activation=lambda batch: TensorSpec(tuple(batch.shape), batch.dtype),
            )
            wanted = [view(each * 2) for each in (batch, batch + 1)]
            outputs = executor.infer(
                [batch, batch + 1],
                output=lambda _, shape=wanted[0].shape: TensorSpec(tuple(shape), torch.float64),
            )
            for output, expected in zip(outputs, wanted, strict=True):
                assert torch.equal(output, expected), name

    ranks(2, body)
