"""`trainstep bench parallel`: one workload under every scheme of data parallel training, on all ranks at once."""
