"""Not Horovod: Shoal's stand-in for it, over torch.distributed. `shoal run` puts it into a script's path."""

from typing import NoReturn

from torch.nn import SyncBatchNorm as SyncBatchNorm

from shoal.script.horovod.collectives import allgather as allgather
from shoal.script.horovod.collectives import allgather_async as allgather_async
from shoal.script.horovod.collectives import allreduce as allreduce
from shoal.script.horovod.collectives import allreduce_ as allreduce_
from shoal.script.horovod.collectives import allreduce_async as allreduce_async
from shoal.script.horovod.collectives import allreduce_async_ as allreduce_async_
from shoal.script.horovod.collectives import barrier as barrier
from shoal.script.horovod.collectives import broadcast as broadcast
from shoal.script.horovod.collectives import broadcast_ as broadcast_
from shoal.script.horovod.collectives import broadcast_async as broadcast_async
from shoal.script.horovod.collectives import broadcast_async_ as broadcast_async_
from shoal.script.horovod.collectives import grouped_allreduce as grouped_allreduce
from shoal.script.horovod.collectives import grouped_allreduce_ as grouped_allreduce_
from shoal.script.horovod.collectives import grouped_allreduce_async as grouped_allreduce_async
from shoal.script.horovod.collectives import grouped_allreduce_async_ as grouped_allreduce_async_
from shoal.script.horovod.collectives import join as join
from shoal.script.horovod.collectives import poll as poll
from shoal.script.horovod.collectives import synchronize as synchronize
from shoal.script.horovod.compression import Compression as Compression
from shoal.script.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
from shoal.script.horovod.reduction import Adasum as Adasum
from shoal.script.horovod.reduction import Average as Average
from shoal.script.horovod.reduction import Max as Max
from shoal.script.horovod.reduction import Min as Min
from shoal.script.horovod.reduction import Product as Product
from shoal.script.horovod.reduction import Sum as Sum
from shoal.script.horovod.refused import missing
from shoal.script.horovod.states import allgather_object as allgather_object
from shoal.script.horovod.states import broadcast_object as broadcast_object
from shoal.script.horovod.states import broadcast_optimizer_state as broadcast_optimizer_state
from shoal.script.horovod.states import broadcast_parameters as broadcast_parameters
from shoal.script.horovod.world import ccl_built as ccl_built
from shoal.script.horovod.world import cross_rank as cross_rank
from shoal.script.horovod.world import cross_size as cross_size
from shoal.script.horovod.world import cuda_built as cuda_built
from shoal.script.horovod.world import ddl_built as ddl_built
from shoal.script.horovod.world import gloo_built as gloo_built
from shoal.script.horovod.world import gloo_enabled as gloo_enabled
from shoal.script.horovod.world import init as init
from shoal.script.horovod.world import is_homogeneous as is_homogeneous
from shoal.script.horovod.world import is_initialized as is_initialized
from shoal.script.horovod.world import local_rank as local_rank
from shoal.script.horovod.world import local_size as local_size
from shoal.script.horovod.world import mpi_built as mpi_built
from shoal.script.horovod.world import mpi_enabled as mpi_enabled
from shoal.script.horovod.world import mpi_threads_supported as mpi_threads_supported
from shoal.script.horovod.world import nccl_built as nccl_built
from shoal.script.horovod.world import rank as rank
from shoal.script.horovod.world import rocm_built as rocm_built
from shoal.script.horovod.world import shutdown as shutdown
from shoal.script.horovod.world import size as size


def __getattr__(name: str) -> NoReturn:
    missing("horovod.torch", name)
