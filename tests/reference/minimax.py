"""Slow, independent minimax methods: numpy float64, one client after another, min over x and max over y.

Written from the methods' equations alone; shares no code with the engine. A point is one dict of arrays: y are the
names that begin with `dual.`, x all others. `gradient(i, z, r, k)` is (g_x, g_y) of f_i itself in one such dict, so x
descends and y ascends along it; it is taken on the batch of round r and local step k, and on the same batch at another
point if asked twice. The opening pass, which asks every client at z0, has r = -1. `cohorts[r]`: the clients of round r;
`steps[r, i]`: their numbers of local steps. A pair is (for x, for y). Nothing here is clipped, normalised or flipped.

    local_sgda  Deng, Mahdavi 2021, arXiv:2102.13152             (section 4.1)
    local_sgdam Sharma et al. 2022, arXiv:2203.04850             (section 4.2)
    fed_sgda_m  Wu et al. 2023, a reconstruction with STORM      (section 4.3)
    sagda       Yang et al. 2022                                 (section 4.4)
    fess_gda    Shen et al. 2024, arXiv:2311.00944               (section 4.5)

Sections are those of the survey these equations come from. A path's `x` holds whole points, x and y together.
"""

import numpy as np

from tests.reference.trees import add, copy, mean, zeros
from tests.reference.variance_reduced import Path


def is_dual(name):
    return name.startswith("dual.")


def part(pair, name):
    """The member of a pair that belongs to this name."""
    return pair[1] if is_dual(name) else pair[0]


def flip(tree):
    """The same with the dual negated: what an oracle whose every direction is one of descent would show."""
    return {name: -value if is_dual(name) else value for name, value in tree.items()}


def move(z, d, rates):
    """x - rate_x d_x, y + rate_y d_y."""
    return {n: z[n] + part(rates, n) * d[n] if is_dual(n) else z[n] - part(rates, n) * d[n] for n in z}


def toward(z, ends, rates):
    """z + rate (mean of the ends - z)."""
    delta = add(mean(ends), z, -1.0)
    return {n: z[n] + part(rates, n) * delta[n] for n in z}


def projected(z, project):
    """`project`: None, or a function of the dual entries alone."""
    if project is None:
        return z
    return {**z, **project({n: z[n] for n in z if is_dual(n)})}


def opening(gradient, z, clients, batches=1):
    """Every client's mean gradient over the batches of the opening pass."""
    return [mean([gradient(i, copy(z), -1, k) for k in range(batches)]) for i in range(clients)]


def plain_steps(gradient, z, i, r, count, lr, project):
    """Simultaneous descent and ascent, both gradients at the same point."""
    own = copy(z)
    for k in range(count):
        own = projected(move(own, gradient(i, own, r, k), lr), project)
    return own


def local_sgda(gradient, z0, clients, cohorts, steps, lr, server_lr=(1.0, 1.0), project=None):
    """Section 4.1. x_i -= eta_x g_x; y_i += eta_y g_y, K times; x += eta_g mean(x_i - x), and so y.

    server_lr: 1 in the original, anything else is FSGDA. project: after each local step, not at the server.
    """
    z, path = copy(z0), Path([], [], [])
    for r, cohort in enumerate(cohorts):
        ends = [plain_steps(gradient, z, i, r, steps[r, i], lr, project) for i in cohort]
        z = toward(z, ends, server_lr)
        path.x.append(z)
    return path


def local_sgdam(gradient, z0, clients, cohorts, steps, lr, alpha, b, start="gradient"):
    """Section 4.2. K times z_i moves by alpha lr d_i, then d_i = (1 - alpha b) d_i + alpha b g at the new point.

    Points and directions are averaged over the cohort. lr, b: pairs; alpha b is the weight of the new gradient.
    start: "gradient", d is the mean over all clients of the gradients at z0; "own", each client begins round 0 with its
    own; "zeros".
    """
    z, d, path = copy(z0), zeros(z0), Path([], [], [])
    first = [d] * clients
    if start != "zeros":
        first = opening(gradient, z, clients)
        d = mean(first)
    rates, weights = times_pair(alpha, lr), times_pair(alpha, b)
    for r, cohort in enumerate(cohorts):
        ends, directions = [], []
        for i in cohort:
            own, d_i = copy(z), copy(first[i] if r == 0 and start == "own" else d)
            for k in range(steps[r, i]):
                own = move(own, d_i, rates)
                g = gradient(i, own, r, k)
                d_i = {n: (1 - part(weights, n)) * d_i[n] + part(weights, n) * g[n] for n in g}
            ends.append(own)
            directions.append(d_i)
        z, d = mean(ends), mean(directions)
        path.x.append(z)
        path.shared.append({"direction": d})
    return path


def times_pair(factor, pair):
    return factor * pair[0], factor * pair[1]


def at(pair, t):
    """A pair, or a function of the number of local steps made before."""
    return pair(t) if callable(pair) else pair


def storm(fresh, u, old, a):
    """g(new) + (1 - a)(u - g(previous)), both on one batch."""
    return {n: fresh[n] + (1 - part(a, n)) * (u[n] - old[n]) for n in fresh}


def fed_sgda_m(
    gradient,
    z0,
    clients,
    cohorts,
    steps,
    lr,
    a,
    server_lr=(1.0, 1.0),
    start="gradient",
    batches=1,
    order="move",
    previous="averaged",
):
    """Section 4.3. K times: z_i moves along u_i, then u_i = g(z_i) + (1 - a)(u_i - g(point before)), on one batch.

    Points and estimators are averaged over the cohort. What is uncertain:
      order: "move", the averaged estimator makes a round's first step; "estimate", it is corrected before that, and the
        last step of a round is made with the client's own estimator.
      previous: the point of a round's first correction: "averaged", the server's (order "estimate": the mean of the
        points at which the averaged estimators were last corrected); "own", the client's own, if it was there the
        round before, else the server's.
      start: "gradient", u is the mean over clients of the gradient at z0 over `batches` batches; "zeros".
      lr, a: pairs, or functions t -> pair, t counting local steps from 0 (unequal steps: the mean over the cohort).
      server_lr: z += server_lr mean(z_i - z).
    """
    z, u, path = copy(z0), zeros(z0), Path([], [], [])
    if start == "gradient":
        u = mean(opening(gradient, z, clients, batches))
    own, last, average, before = [copy(z0) for _ in range(clients)], [-1] * clients, copy(z0), 0.0
    for r, cohort in enumerate(cohorts):
        ends, estimates, points = [], [], []
        for i in cohort:
            y, u_i = copy(z), copy(u)
            p = average if order == "estimate" else z
            if previous == "own":
                p = own[i] if last[i] == r - 1 else z
            for k in range(steps[r, i]):
                rates, weights = at(lr, before + k), at(a, before + k)
                if order == "move":
                    y = move(y, u_i, rates)
                u_i = storm(gradient(i, y, r, k), u_i, gradient(i, p, r, k), weights)
                p = y
                if order == "estimate":
                    y = move(y, u_i, rates)
            ends.append(y)
            estimates.append(u_i)
            points.append(p)
            own[i], last[i] = p, r
        z, u, average = toward(z, ends, server_lr), mean(estimates), mean(points)
        before += float(np.mean([steps[r, i] for i in cohort]))
        path.x.append(z)
        path.shared.append({"estimator": u, "previous": average})
        path.own.append(list(own))
    return path


def sagda(gradient, z0, clients, cohorts, steps, lr, server_lr=(1.0, 1.0), start="zeros", controls=None):
    """Section 4.4. z_i moves along g - v_i + v; v_i = mean of the K raw g; v += (1/N) sum of their changes.

    start: v_i = 0; "gradient": v_i is the gradient at z0, v their mean.
    controls: None, the cohort refreshes its v_i on its own path, for the next round. Else a second cohort for each
    round, which refreshes v_i and v at the server's point, on the round's own K batches, before the local steps.
    """
    z, path = copy(z0), Path([], [], [])
    own = [zeros(z0) for _ in range(clients)]
    if start == "gradient":
        own = opening(gradient, z, clients)
    v = mean(own)
    for r, cohort in enumerate(cohorts):
        if controls is not None:
            for i in controls[r]:
                own[i] = mean([gradient(i, z, r, k) for k in range(steps[r, i])])
            v = mean(own)
        ends, changes = [], []
        for i in cohort:
            y, seen = copy(z), []
            for k in range(steps[r, i]):
                g = gradient(i, y, r, k)
                y = move(y, {n: g[n] - own[i][n] + v[n] for n in g}, lr)
                seen.append(g)
            ends.append(y)
            if controls is None:
                changes.append(add(mean(seen), own[i], -1.0))
                own[i] = mean(seen)
        z = toward(z, ends, server_lr)
        if changes:
            v = add(v, mean(changes, clients))
        path.x.append(z)
        path.shared.append({"control": v})
        path.own.append(list(own))
    return path


def fess_gda(gradient, z0, clients, cohorts, steps, lr, rho, beta, server_lr=(1.0, 1.0), project=None, centre=None):
    """Section 4.5. Plain local steps; the server pulls x to a centre c that follows it.

    x+ = x + eta_gx mean(x_i - x) - eta_lx eta_gx K rho (x - c);  y+ = project(y + eta_gy mean(y_i - y));
    c+ = c + beta (x+ - c). K: with unequal steps, the mean over the cohort. centre: c at first, x0 in the method.
    project: the dual, after each local step and at the server.
    """
    z, path = copy(z0), Path([], [], [])
    c = {n: value for n, value in copy(z0 if centre is None else centre).items() if not is_dual(n)}
    for r, cohort in enumerate(cohorts):
        ends = [plain_steps(gradient, z, i, r, steps[r, i], lr, project) for i in cohort]
        pull = lr[0] * server_lr[0] * float(np.mean([steps[r, i] for i in cohort])) * rho
        new = projected(toward(z, ends, server_lr), project)
        z = {n: new[n] if is_dual(n) else new[n] - pull * (z[n] - c[n]) for n in z}
        c = {n: c[n] + beta * (z[n] - c[n]) for n in c}
        path.x.append(z)
        path.shared.append({"centre": c})
    return path
