output "kubeconfig" {
  description = "The command that writes the cluster into your kubeconfig."
  value       = "aws eks update-kubeconfig --region ${var.region} --name ${aws_eks_cluster.this.name}"
}

output "file_system" {
  description = "For the StorageClass of the workspace (parameters.fileSystemId)."
  value       = aws_efs_file_system.workspace.id
}
