"""How well a linear classifier learns handwritten digits, as a Python function of its parameters: `ephemeron tune study.toml` searches for
the best. It needs scikit-learn, and no PyTorch."""

from __future__ import annotations

from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import train_test_split

from ephemeron.tuning import Trial

EPOCHS = 20


def fit(alpha: float, eta0: float, loss: str, trial: Trial) -> dict[str, float]:
    """Accuracy after so many epochs.

    Args:
        alpha: weight of the penalty.
        eta0: learning rate.
        loss: of scikit-learn.
        trial: takes the accuracy after each epoch, by which the pruner ends trials that do badly.
    """
    images, digits = load_digits(return_X_y=True)
    train, test, train_digits, test_digits = train_test_split(images / 16, digits, random_state=0)
    model = SGDClassifier(alpha=alpha, eta0=eta0, loss=loss, learning_rate="invscaling", random_state=0)
    for epoch in range(EPOCHS):
        model.partial_fit(train, train_digits, classes=range(10))
        trial.report(epoch, model.score(test, test_digits))
    return {"accuracy": model.score(test, test_digits), "of_training": model.score(train, train_digits)}
