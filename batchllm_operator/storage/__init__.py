"""Folders on local disk and in object stores. Raises `StorageError` when the storage fails."""

from batchllm_operator.storage.folder import Folder as Folder
from batchllm_operator.storage.folder import fsync as fsync
from batchllm_operator.storage.many_files import StoredFile as StoredFile
from batchllm_operator.storage.many_files import hash_files as hash_files
from batchllm_operator.storage.many_files import list_files as list_files
from batchllm_operator.storage.many_files import read_files as read_files
from batchllm_operator.storage.many_files import remove_files as remove_files
