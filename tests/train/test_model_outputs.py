"""Batches and outputs in the forms that people have: `fit` trains on them, and says what is so."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_lab import evaluate, fit
from amp_lab.core.errors import OptionError
from amp_lab.train.model_outputs import accuracy, cross_entropy, returned_loss, split

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")

PLAIN = {"precision": "fp32", "device": "cpu"}


class Tokens(nn.Module):
    """Logits (B, T, V) for tokens (B, T); with labels, the loss in one of the usual forms."""

    def __init__(self, form="logits", vocabulary=7):
        super().__init__()
        self.form = form
        self.embed, self.head = nn.Embedding(vocabulary, 16), nn.Linear(16, vocabulary)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))
        if self.form == "logits":
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return {
            "dict": {"loss": loss, "logits": logits},
            "logits first": (logits, loss),
            "loss first": (loss, logits),
            "loss alone": loss,
            "object": SimpleNamespace(loss=loss, logits=logits),
            "losses": {"loss_box": loss / 2, "loss_class": loss / 2},
        }[self.form]


def tokens(count=3):
    """Batches of 4 x 5 tokens; the label of each is the token that comes next in the alphabet."""
    ids = torch.arange(count * 20).reshape(count, 4, 5) % 7
    return [{"input_ids": batch, "labels": (batch + 1) % 7} for batch in ids]


def train(model, batches, epochs=1, lr=0.5, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    settings = PLAIN | options
    return fit(model, lambda *_: batches, epochs=epochs, optimizer=optimizer, **settings)


FORMS = ["logits", "dict", "logits first", "loss first", "loss alone", "object", "losses"]


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_returns_its_loss_learns_as_one_that_returns_logits(form):
    weights, losses = [], []
    for each in ("logits", form):
        torch.manual_seed(1)
        model = Tokens(each)
        losses.append([epoch.train_loss for epoch in train(model, tokens(), epochs=20)])
        weights.append(model.head.weight)
    torch.testing.assert_close(weights[1], weights[0])  # the mean over tokens is the same
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] < 0.3 * losses[0][0]


@pytest.mark.parametrize("form", ["logits", "dict", "logits first", "loss first"])
def test_tokens_are_counted_each(form):
    model = Tokens(form)
    train(model, tokens(), epochs=60)
    loss, share = evaluate(model, tokens(), **PLAIN)
    assert loss < 0.1
    assert share == 1
    wrong = [batch | {"labels": batch["labels"].clone()} for batch in tokens()]
    for batch in wrong:
        batch["labels"][:, 0] = (batch["labels"][:, 0] + 1) % 7
    assert evaluate(model, wrong, **PLAIN)[1] == pytest.approx(4 / 5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_loss_of_the_model_is_scaled_like_any_other(precision):
    (*_, last) = train(Tokens("dict"), tokens(), epochs=30, precision=precision)
    assert last.train_loss < 0.5
    assert last.train_accuracy > 0.9


FORMS_OF_A_BATCH = {
    "a pair": lambda x, y: (x, y),
    "a list, as DataLoader makes it": lambda x, y: [x, y],
    "inputs by name": lambda x, y: ({"input_ids": x}, y),
    "a tuple of inputs": lambda x, y: ((x,), y),
    "by name": lambda x, y: {"input_ids": x, "labels": y},
    "under a name that the model does not take": lambda x, y: {"input_ids": x, "targets": y},
}


@pytest.mark.parametrize("form", FORMS_OF_A_BATCH)
def test_batches_come_in_any_usual_form(form):
    batches = [FORMS_OF_A_BATCH[form](b["input_ids"], b["labels"]) for b in tokens()]
    torch.manual_seed(1)
    model = Tokens()
    expected = evaluate(model, [tuple(batch.values()) for batch in tokens()], **PLAIN)
    assert evaluate(model, batches, **PLAIN) == expected
    assert math.isfinite(train(model, batches, accumulate=2)[0].train_loss)


def test_two_inputs_and_a_batch_without_targets():
    two = nn.Bilinear(3, 4, 2)
    x, z, y = torch.randn(6, 3), torch.randn(6, 4), torch.zeros(6, dtype=torch.long)
    assert 0 <= evaluate(two, [(x, z, y), ((x, z), y)], **PLAIN)[1] <= 1

    class Autoencoder(nn.Linear):
        def forward(self, given):
            return (super().forward(given) - given).square().mean()

    for batch in (x, (x,), [x]):
        loss, share = evaluate(Autoencoder(3, 3), [batch], **PLAIN)
        assert loss > 0
        assert math.isnan(share)


def test_samples_are_counted_whatever_the_form():
    model, x, y = Tokens(), torch.zeros(4, 5), torch.zeros(4)
    for batch in ((x, y), {"input_ids": x}, x, (x, None), ({"a": x}, {"b": y}), ([x] * 4, [y] * 4)):
        assert split(batch, model).samples == 4
    for batch in (("text", 3), {"n": 3}, torch.tensor(1.0), (x, torch.tensor(1.0))):
        with pytest.raises(OptionError, match="a batch begins with a"):
            split(batch, model)


def test_segmentation_counts_pixels():
    """Its accuracy was a number of pixels once."""
    x = torch.randn(4, 3, 8, 8)
    y = (x[:, 0] > 0).long()
    model = nn.Conv2d(3, 2, 1)
    (*_, last) = train(model, [(x, y)], epochs=50, test_batches=lambda: [(x, y)])
    assert 0.9 < last.train_accuracy <= 1
    assert 0.9 < last.test_accuracy <= 1
    nothing = torch.full_like(y, -100)
    assert accuracy(model(x), nothing).tolist() == [0, 0, 0, 0]
    half = torch.where(torch.arange(8) < 4, model(x).argmax(1), -100)
    assert accuracy(model(x), half).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("shape", [(6, 1), (6,)])
def test_a_regression_has_a_loss_and_no_accuracy(shape):
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0) if len(shape) == 1 else nn.Identity())
    batches = [(torch.ones(6, 3), torch.ones(shape))]
    first, *_, last = train(model, batches, epochs=9, loss_fn=F.mse_loss, lr=0.1)
    assert last.train_loss < first.train_loss
    assert math.isnan(last.train_accuracy)


def test_any_metric_or_none():
    x, y = torch.randn(6, 3), torch.randn(6, 1)
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    model = nn.Linear(3, 1)
    error = (model(x) - y).detach().abs().mean().item()
    metrics = {
        "each": lambda out, y: (out - y).abs().flatten(),
        "mean": F.l1_loss,
        "of each value": lambda out, y: (out - y).abs(),
        "plain number": lambda out, y: F.l1_loss(out, y).item(),
    }
    for metric in metrics.values():
        found = evaluate(model, batches, loss_fn=F.mse_loss, metric=metric, **PLAIN)[1]
        assert found == pytest.approx(error, rel=1e-5)
    trained = train(model, batches, epochs=2, loss_fn=F.mse_loss, metric=F.l1_loss)
    assert all(epoch.train_accuracy > 0 for epoch in trained)
    assert math.isnan(evaluate(model, batches, loss_fn=F.mse_loss, metric=None, **PLAIN)[1])


def test_the_dimension_of_the_classes():
    y, whole = torch.randint(4, (2, 3)), torch.randint(4, (2,))
    logits = torch.randn(2, 3, 4)
    expected = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    torch.testing.assert_close(cross_entropy(logits, y), expected)
    torch.testing.assert_close(cross_entropy(logits.mT, y), expected)
    assert torch.equal(accuracy(logits, y), accuracy(logits.mT, y))
    one = logits[:, 0]
    torch.testing.assert_close(cross_entropy(one, whole), F.cross_entropy(one, whole))
    soft = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    assert math.isnan(accuracy(torch.randn(2, 2), soft))
    assert cross_entropy(torch.zeros(2, 2), soft).item() == pytest.approx(math.log(2))
    with pytest.raises(OptionError, match=r"logits \(2, 3, 3\) for targets \(2, 3\)"):
        cross_entropy(torch.randn(2, 3, 3), y % 3)
    for outputs, targets in ((torch.zeros(2, 2), None), ("text", whole)):
        with pytest.raises(OptionError, match="give loss_fn"):
            cross_entropy(outputs, targets)


def test_an_auxiliary_loss_alone_is_not_the_loss():
    assert returned_loss({"aux_loss": torch.tensor(1.0), "logits": torch.zeros(2, 2)}) is None
    assert returned_loss((torch.zeros(2, 2), torch.zeros(2))) is None
    assert returned_loss(torch.zeros(2, 2)) is None


def test_a_tuple_among_several_inputs_is_one_argument_of_the_model():
    pair, other, targets = (torch.ones(2, 1), torch.ones(2, 3)), torch.ones(2, 2), torch.zeros(2)
    found = split((pair, other, targets), nn.Linear(1, 1))
    assert found.args == (pair, other)
    assert found.targets is targets
    assert split((pair, targets), nn.Linear(1, 1)).args == pair


def test_one_output_for_two_classes_needs_a_loss_of_its_own():
    logits = torch.randn(3)
    targets = torch.tensor([0, 1, 1])
    assert math.isnan(accuracy(logits, targets))
    with pytest.raises(OptionError, match=r"\(3,\).*loss_fn"):
        cross_entropy(logits, targets)
