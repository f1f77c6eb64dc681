"""Entry point: everything real is in lib/."""
from dataclasses import asdict

from lib.data import make_loader
from lib.engine import Engine
from lib.settings import Settings
from lib.utils import fix_randomness


def main():
    cfg = Settings.from_args()
    fix_randomness(cfg.seed)
    engine = Engine(cfg, make_loader(cfg))
    engine.maybe_resume()
    engine.fit()
    print(asdict(cfg))


if __name__ == "__main__":
    main()
