"""Recorded episodes: data sets of other libraries, read into buffers and written from them.

Functions import h5py, pyarrow and minari when they are called.
"""

from buffers.datasets.dataset import DatasetError, EpisodeDataset
from buffers.datasets.files import from_hdf5, from_parquet, to_hdf5, to_parquet
from buffers.datasets.flat import from_arrays, from_buffer
from buffers.datasets.minari import from_minari, to_minari

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
