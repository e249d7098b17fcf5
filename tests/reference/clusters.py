"""Models of clusters of clients, in numpy float64, from the papers; shares no code with the engine.

ifca        Ghosh, Chung, Yin, Ramchandran 2020, arXiv:2006.04088, Algorithm 1 with model averaging
"""

from tests.reference.trees import add, copy, zeros


def ifca(problem, starts, cohorts, steps, lr):
    """(the models after each round, the choices of each round, the choices of all clients at the end)."""
    models, path, chosen = [copy(x) for x in starts], [], []

    def choice(i):
        losses = [problem.loss(i, x) for x in models]
        return losses.index(min(losses))

    for r, cohort in enumerate(cohorts):
        choices, moved = [choice(i) for i in cohort], [zeros(x) for x in models]
        for i, j in zip(cohort, choices, strict=True):
            y = copy(models[j])
            for k in range(steps[r, i]):
                y = add(y, problem.gradient(i, y, r, k), -lr)
            moved[j] = add(moved[j], add(y, models[j], -1.0))
        models = [add(x, m, 1 / max(1, choices.count(j))) for j, (x, m) in enumerate(zip(models, moved, strict=True))]
        path.append(models)
        chosen.append(choices)
    return path, chosen, [choice(i) for i in range(problem.clients)]
