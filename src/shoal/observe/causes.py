"""The classes of failure, and what to do about each: advice follows from the cause. Never imports torch."""

from __future__ import annotations

# What the person who reads it should do. docs/runbooks/NAME.md says more.
CAUSES = {
    "user-error": "correct the run file or the command, then start again",
    "environment": "mend what the sentence names, then `shoal resume`",
    "data": "`shoal data info FOLDER --verify` finds the damage; then `shoal resume`",
    "checkpoint": "`shoal checkpoint ls` shows which ones are good",
    "numerics": "lower the learning rate or lengthen the warm-up, then `shoal resume`",
    "host-memory": "use fewer processes, a smaller mesh.micro_batch, or a machine with more memory",
    "device-memory": "lower mesh.micro_batch or data.seq_len, or raise mesh.dp_shard",
    "disk-full": "free space or lower checkpoint.keep",
    "network": "look at the rank that the others lost; if none failed, at the network between them",
    "hang": "look at the stack of the named rank, in the journal's `hang` record or at the end of its log; if it was "
    "only slow, set guard.hang to a longer time",
    "hardware": "take the machine out of service and look at its kernel log",
    "crash": "native code failed: the Python stack is at the end of the rank's log",
    "node-lost": "ask the scheduler what became of that node; the run goes on when there is another one",
    "killed": "somebody or something outside Shoal ended the process",
    "exception": "read the traceback in the rank's log",
    "unknown": "the worker left without a word; read the rank's log",
    "timeout": "give a unit more time (batch.timeout), or less to do",
    "no-output": "look at why the unit ends with 0 and leaves no such file, or correct batch.outputs",
    "supervisor-lost": "nothing to do: the run goes on from its newest checkpoint",
}

# Where the run is a script: Shoal's own values are not what it goes by.
OF_SCRIPTS = {
    "user-error": "correct the command or the script, then start again",
    "data": "look at the data that the script reads, then `shoal resume`",
    "checkpoint": "look at the checkpoint that the script reads, then `shoal resume`",
    "numerics": "lower the script's learning rate or lengthen its warm-up, then `shoal resume`",
    "host-memory": "use fewer processes, smaller batches, fewer loader processes, or a machine with more memory",
    "device-memory": "use smaller batches or shorter sequences in the script",
    "disk-full": "free space, or let the script keep fewer checkpoints",
    "unknown": "the script left without a word; read the rank's log",
}


# Where the run is a batch.
OF_BATCHES = {
    "user-error": "correct the command, then `shoal resume NAME batch.command=[…]`",
    "data": "look at the data that the unit reads, then `shoal resume`",
    "host-memory": "run fewer at once (batch.at_once), or use a machine with more memory",
    "device-memory": "run fewer at once (batch.at_once), or use smaller batches in the command",
    "disk-full": "free space, then `shoal resume`",
    "crash": "native code failed: read the unit's log",
    "exception": "read the traceback in the unit's log",
    "unknown": "the unit left without a word; read its log",
    "network": "look at what the unit talks to, then `shoal resume`",
    "supervisor-lost": "look whether this unit ends the whole machine or its runner (memory), and run it alone",
}

# What became of a unit of a batch, after its number.
OF_UNITS = {
    "user-error": "was called wrongly",
    "environment": "misses something on its machine",
    "data": "was given bad data",
    "host-memory": "ran out of memory",
    "device-memory": "ran out of the GPU's memory",
    "disk-full": "found the disk full",
    "network": "lost its connection",
    "hardware": "met broken hardware",
    "crash": "crashed",
    "killed": "was killed",
    "exception": "raised an exception",
    "timeout": "took longer than batch.timeout",
    "no-output": "made no output",
    "supervisor-lost": "was lost with its runner again and again",
    "unknown": "failed without a word",
}


def advice_of(cause: str, script: bool = False) -> str | None:
    return (OF_SCRIPTS.get(cause) if script else None) or CAUSES.get(cause)


# They strike one process, machine or link from outside: nothing in the run is to be mended, and with islands the others
# would go on. All other classes come again, on every island, until what the advice names is done.
FROM_OUTSIDE = ("killed", "node-lost", "hardware", "crash", "network", "supervisor-lost")
