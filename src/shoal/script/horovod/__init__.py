"""Shoal's stand-in for Horovod: what a script says to `horovod.torch`, done by torch.distributed.

The script finds it under Horovod's own name (`horovod_path`), where `shoal run` has put it in front of its path.
"""
