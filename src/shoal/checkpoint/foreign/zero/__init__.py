"""What DeepSpeed itself has saved: ZeRO's folders and universal ones, read without unpickling anything."""
