"""Episodes recorded before: data sets of other libraries, read into buffers and written from them.

h5py, pyarrow and minari are imported when the function that needs them is called.
"""

from buffers.datasets.arrays import from_arrays
from buffers.datasets.dataset import DatasetError, EpisodeDataset
from buffers.datasets.hdf5 import from_hdf5, to_hdf5
from buffers.datasets.held import from_buffer
from buffers.datasets.minari import from_minari, to_minari
from buffers.datasets.parquet import from_parquet, to_parquet

__all__ = [
    "DatasetError",
    "EpisodeDataset",
    "from_arrays",
    "from_buffer",
    "from_hdf5",
    "from_minari",
    "from_parquet",
    "to_hdf5",
    "to_minari",
    "to_parquet",
]
