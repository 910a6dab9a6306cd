{{/* All rights that Airflow gets in the pods' namespace. */}}

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
{{- end -}}

{{- define "batchllm.rules.triggerer" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [get, delete]
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
{{- end -}}
