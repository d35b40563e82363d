"""How processes exchange data: channels through storage, keys and message formats, and RPC between processes that can connect."""
