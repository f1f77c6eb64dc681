"""A loop of one's own: `own.loop: loop:train` in a run file, or `python examples/own/loop.py`."""

import shoal


def train(session: shoal.Session) -> None:
    smooth = None
    for step in session.steps():
        record = session.step()
        smooth = record["loss"] if smooth is None else 0.9 * smooth + 0.1 * record["loss"]
        if step % 10 == 0:
            session.log(smooth_loss=smooth)


if __name__ == "__main__":
    with shoal.session("examples/own/run.yaml", ["name=own-loop"], workspace="scratch") as session:
        train(session)
