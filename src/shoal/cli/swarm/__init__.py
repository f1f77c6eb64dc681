"""Train one model with peers anywhere: homes, offices, data centres, behind NATs, over slow links.

  shoal swarm create RUN.yaml          makes a swarm of this run, prints an invitation, and trains
  shoal swarm join INVITE              gets the run and its data from the peers, and trains; no open port needed;
                                       @FILE or - in its place keeps it out of `ps` and the history; --dry-run looks
  shoal swarm join RUN                 starts a peer again that was in before
  shoal swarm invite RUN               prints the invitation again, with the addresses of now; --new makes another
  shoal swarm status RUN               who is in, how each link stands, how busy all are; --watch, --picture FILE
  shoal swarm leave RUN                ends this peer with a word to the others, who go on
  shoal swarm revoke RUN PEER|INVITE   the organiser puts somebody out, or ends an invitation
  shoal swarm doctor INVITE            says before training what keeps this machine from the others
  shoal swarm relay                    carries packets for peers that cannot reach each other

Values of the run file are set with `create`; what is a peer's own (resources, mesh, track, some of checkpoint) with
`join` too. docs/guide/swarm.md says what peers share and whom they trust.
"""

from __future__ import annotations

import argparse
from importlib import import_module

TAKES_OVERRIDES = True
OWN_OPTIONS = ("name",)  # the peer's; that of the run is `name=…`
WORDS = {
    "create": "make a swarm of a run file, and train",
    "join": "enter a swarm, and train",
    "invite": "print an invitation",
    "status": "who is in, and how it goes",
    "leave": "end this peer; the others go on",
    "revoke": "put a peer out, or end an invitation",
    "doctor": "what keeps this machine from the others",
    "relay": "carry packets for peers that cannot reach each other",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = parser.add_subparsers(dest="word", metavar="|".join(WORDS), required=True)
    for word, summary in WORDS.items():
        module = import_module(f"shoal.cli.swarm.{word}")
        module.add_arguments(words.add_parser(word, help=summary, description=module.__doc__))


def run(args: argparse.Namespace) -> int:
    if args.overrides and args.word not in ("create", "join"):
        from shoal.errors import UsageError

        raise UsageError(f"`shoal swarm {args.word}` takes no values of the run file such as {args.overrides[0]}.")
    return int(import_module(f"shoal.cli.swarm.{args.word}").run(args) or 0)
