{{/* All rights that Airflow, and Spark's driver, get in the pods' namespace. */}}

{{- define "batchllm.rules.worker" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [create, get, list, patch, delete]
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
{{- if .Values.connections.createSecrets }}
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, delete]
{{- end }}
{{- if .Values.spark.enabled }}
- apiGroups: [sparkoperator.k8s.io]
  resources: [sparkapplications]
  verbs: [create, delete]
- apiGroups: [sparkoperator.k8s.io]
  resources: [sparkapplications/status]
  verbs: [get]
{{- end }}
{{- end -}}

{{/* What Spark documents for a driver: executors, their settings, its own address. */}}
{{- define "batchllm.rules.spark" -}}
- apiGroups: [""]
  resources: [pods, services, configmaps, persistentvolumeclaims]
  verbs: [create, get, list, watch, patch, delete, deletecollection]
{{- end -}}

{{- define "batchllm.rules.triggerer" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [get, delete]
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
{{- end -}}
