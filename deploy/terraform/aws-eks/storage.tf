# The workspace: one file system for all pods (launch.volumes), and the driver that mounts it.

resource "aws_efs_file_system" "workspace" {
  encrypted       = true
  throughput_mode = "elastic"
  tags            = merge(local.tags, { Name = "${var.name}-workspace" })
}

resource "aws_security_group" "workspace" {
  name        = "${var.name}-workspace"
  description = "NFS from the cluster's machines."
  vpc_id      = var.vpc_id
  tags        = local.tags
}

resource "aws_vpc_security_group_ingress_rule" "workspace" {
  security_group_id            = aws_security_group.workspace.id
  referenced_security_group_id = aws_eks_cluster.this.vpc_config[0].cluster_security_group_id
  ip_protocol                  = "tcp"
  from_port                    = 2049
  to_port                      = 2049
}

resource "aws_efs_mount_target" "workspace" {
  for_each        = toset(var.subnet_ids)
  file_system_id  = aws_efs_file_system.workspace.id
  subnet_id       = each.key
  security_groups = [aws_security_group.workspace.id]
}

resource "aws_iam_role" "workspace" {
  name = "${var.name}-workspace"
  tags = local.tags
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = ["sts:AssumeRole", "sts:TagSession"]
      Principal = { Service = "pods.eks.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy_attachment" "workspace" {
  role       = aws_iam_role.workspace.name
  policy_arn = "arn:${data.aws_partition.current.partition}:iam::aws:policy/service-role/AmazonEFSCSIDriverPolicy"
}

resource "aws_eks_addon" "workspace" {
  cluster_name = aws_eks_cluster.this.name
  addon_name   = "aws-efs-csi-driver"

  pod_identity_association {
    role_arn        = aws_iam_role.workspace.arn
    service_account = "efs-csi-controller-sa"
  }

  depends_on = [aws_eks_node_group.system, aws_eks_addon.plain]
}
